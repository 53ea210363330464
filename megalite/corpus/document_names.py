"""Ids and sources of a shard's documents in a file of their own, to look some of them up by row.

A station that removes a document names the one that it repeats, which may lie in any other shard. The files are not
compressed and mapped, so that looking up a few names reads a few pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from megalite.corpus.documents import ARROW_TYPE
from megalite.stations.tasks import replacing

NAMES_SCHEMA = pa.schema([("id", ARROW_TYPE), ("source", ARROW_TYPE)])


def write_names(path: Path, names: Sequence[pa.RecordBatch]) -> None:
    """Write the names of a shard's documents, in their order.

    Args:
        path: the file.
        names: columns of NAMES_SCHEMA.
    """
    table = pa.Table.from_batches(names, NAMES_SCHEMA)
    sources = table.column("source").combine_chunks().dictionary_encode()
    table = table.set_column(1, "source", sources)
    with replacing(path) as partial, pa.ipc.new_file(str(partial), table.schema) as writer:
        writer.write_table(table)


def look_up(shards: np.ndarray, rows: np.ndarray, file_of: Callable[[int], Path]) -> pa.Table:
    """The names of some documents, in the order asked for: columns of NAMES_SCHEMA.

    Args:
        shards: int64 [documents], the shard of each.
        rows: int64 [documents], its row in the shard.
        file_of: the file of a shard's names.
    """
    order = np.argsort(shards, kind="stable")
    tables = [NAMES_SCHEMA.empty_table()]
    for shard in np.unique(shards).tolist():
        with pa.memory_map(str(file_of(shard))) as file:
            names = pa.ipc.open_file(file).read_all()
            tables.append(names.take(pa.array(rows[order][shards[order] == shard])).cast(NAMES_SCHEMA))
    return pa.concat_tables(tables).take(pa.array(np.argsort(order))).combine_chunks()
