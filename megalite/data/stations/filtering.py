"""The second half of every station that takes documents away: write what stays, and name what goes.

The text of a removed document stays where it was, in the folder of the station before; `removed/` has its name, why it
went, and a detail (what it repeats, its score).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from megalite.data.corpus import Corpus
from megalite.data.documents import ARROW_TYPE, ShardWriter, Sorted, shard_name
from megalite.data.progress import Progress
from megalite.data.shards import ShardReading
from megalite.data.tasks import Report, Runner, Task, TaskFunction, add_counts, run_tasks
from megalite.data.texts import Texts
from megalite.errors import DataError

REMOVED_FOLDER = "removed"

REMOVED_SCHEMA = pa.schema([(name, ARROW_TYPE) for name in ("id", "source", "reason", "detail")])


class Decision(NamedTuple):
    """What becomes of a batch."""

    keep: np.ndarray
    """bool [documents]"""
    reason: str
    """Why the others go."""
    texts: Texts | None = None
    """The texts of all, if any was changed."""
    details: list[str] | None = None
    """Of all documents; shown for those that go."""


Decide = Callable[[pa.RecordBatch, Texts, int], Decision]
"""Decides about a batch: its documents, their texts, and the row of the first of them in the shard."""


def station_paths(corpus: Corpus, station: str) -> list[str]:
    """The Parquet files of a corpus that earlier stations wrote.

    Raises:
        DataError: some of it is raw.
    """
    shards = corpus.shards()
    for shard in shards:
        if "station" not in shard:
            raise DataError(
                f"{shard['root']}: raw files, and station {station!r} reads documents that a station wrote; run "
                "`megalite data clean` or `megalite data dedup` first, and give it their folder"
            )
    return [shard["station"] for shard in shards]


def write_shards(
    folder: Path, function: TaskFunction, tasks: list[Task], *, runner: Runner, progress: Progress
) -> dict[str, Any]:
    """Run the writing tasks, and add up what they report."""
    reports = run_tasks(folder, "write", function, tasks, runner=runner, progress=progress)
    return {name: add_counts(reports, name) for name in reports[0] if name != "megabytes"} if reports else {}


def write_shard(path: str, number: int, folder: Path, decide: Decide) -> Report:
    """Write what stays of one shard.

    Args:
        path: a Parquet file that a station wrote.
        number: of the task.
        folder: the station's folder.
        decide: says what stays.
    """
    sources: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    num_bytes, row = 0, 0
    removed = ShardWriter(folder / REMOVED_FOLDER / shard_name(number), REMOVED_SCHEMA)
    with Sorted(folder, number) as result, removed:
        for documents, texts in _batches(path):
            decision = decide(documents, texts, row)
            if decision.texts is not None:
                documents = _with_texts(documents, decision.texts)
            empty = (decision.texts or texts).lengths == 0
            keep = decision.keep & ~empty
            gone = pa.array(~keep)
            result.keep(documents.filter(pa.array(keep)))
            result.count_removed(int((~keep).sum()))
            why = np.where(decision.keep, "nothing is left", decision.reason)[~keep].tolist()
            details = np.array(decision.details or [""] * len(keep), dtype=object)[~keep].tolist()
            names = [documents.column(name).filter(gone) for name in ("id", "source")]
            columns = [*names, pa.array(why, ARROW_TYPE), pa.array(details, ARROW_TYPE)]
            removed.write(pa.RecordBatch.from_arrays(columns, schema=REMOVED_SCHEMA))
            reasons.update(why)
            sources.update(names[1].to_pylist())
            num_bytes += texts.num_bytes
            row += len(texts)
    counts = result.counts()
    del counts["rejected"]  # nothing is unreadable in what a station wrote
    return {
        **counts,
        "text_bytes_in": num_bytes,
        "removed": dict(sorted(reasons.items())),
        "removed_by_source": dict(sorted(sources.items())),
        "megabytes": num_bytes / 1e6,
    }


def _batches(path: str):
    for batch in ShardReading({"station": path}):
        yield batch.documents, batch.texts


def _with_texts(documents: pa.RecordBatch, texts: Texts) -> pa.RecordBatch:
    position = documents.schema.get_field_index("text")
    return documents.set_column(position, documents.schema.field(position), texts.to_arrow())
