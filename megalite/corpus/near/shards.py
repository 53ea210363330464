"""Where the documents come from: a shard is a JSON object, and this is the one module that reads it.

{"path": "part-00000.parquet",            a Parquet file with a column `text` and, for reports, `id`
 "scores": "part-00000.scores.npy",       a number a document, with keep: best
 "sources": "part-00000.sources.npy"}     a code a document, an index into the names of the sources; optional
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow.parquet as pq

from megalite.errors import DataError
from megalite.texts import Texts

Shard = dict[str, Any]

TEXT_COLUMN = "text"

ID_COLUMN = "id"


def read_texts(shard: Shard) -> Iterator[Texts]:
    """The texts of a shard in order, a row group at a time.

    Raises:
        DataError: there is no text column, or a text is null.
    """
    with pq.ParquetFile(shard["path"]) as file:
        if TEXT_COLUMN not in file.schema_arrow.names:
            raise DataError(
                f"{shard['path']}: no column {TEXT_COLUMN!r}, only {', '.join(file.schema_arrow.names)}; "
                "run the station that writes documents first"
            )
        for group in range(file.num_row_groups):
            column = file.read_row_group(group, columns=[TEXT_COLUMN], use_threads=False).column(0)
            if column.null_count:
                raise DataError(f"{shard['path']}: {column.null_count} texts are null; remove these rows first")
            if len(column):
                yield Texts.from_arrow(column)


def read_ids(shard: Shard, rows: Sequence[int]) -> list[str]:
    """Names of some documents; file and row where they have none."""
    with pq.ParquetFile(shard["path"]) as file:
        if ID_COLUMN not in file.schema_arrow.names:
            return [f"{shard['path']}:{row}" for row in rows]
        column = file.read(columns=[ID_COLUMN], use_threads=False).column(0)
    return [str(column[row].as_py()) for row in rows]
