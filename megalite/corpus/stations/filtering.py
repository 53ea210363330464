"""What all stations that take documents away share: their frame, and writing what stays and naming what goes.

    find    the station's own tasks            over the shards of an earlier station
    write   a shard                            what stays -> part-*.parquet, what goes by name -> removed/part-*.parquet

The text of a removed document stays where it was, in the folder of the station before; `removed/` has its name, why it
went, a detail (its score, say), and of a duplicate the name of the document that was kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypedDict, TypeVar

import numpy as np
import pyarrow as pa

from megalite.corpus.corpus import Corpus
from megalite.corpus.documents import (
    ARROW_TYPE,
    ShardOutput,
    ShardWriter,
    shard_name,
    what_is_kept,
    with_column,
    with_texts,
)
from megalite.corpus.shards import ShardReading
from megalite.corpus.stations.conversing import EDITS, refuse_conversations
from megalite.errors import DataError
from megalite.progress import NoProgress, ProgressReporter
from megalite.section import Section
from megalite.stations.runners import InProcess
from megalite.stations.station import StationResult, run_station
from megalite.stations.tasks import Report, Runner, Task, TaskFunction, add_counts, replacing, run_tasks
from megalite.texts import Texts

REMOVED_FOLDER = "removed"

REMOVED_SCHEMA = pa.schema([(name, ARROW_TYPE) for name in ("id", "source", "reason", "detail")])

TWINS_SCHEMA = pa.schema([*REMOVED_SCHEMA, *((name, ARROW_TYPE) for name in ("kept_id", "kept_source"))])
"""Where each document went because of another one."""


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
    metadata: pa.Array | None = None
    """That of all, if any was changed."""
    twins: pa.Table | None = None
    """Of all documents, id and source of the one that each repeats; shown for those that go, with TWINS_SCHEMA."""


Decide = Callable[[pa.RecordBatch, Texts, int], Decision]
"""Decides about a batch: its documents, their texts, and the row of the first of them in the shard."""


class TaskOptions(TypedDict):
    """Where tasks run, and who is told how far they are: keyword arguments of `run_tasks`."""

    runner: Runner
    progress: ProgressReporter


class Filtering:
    """One run of such a station.

    Args:
        station: its name.
        corpus: documents of an earlier station.
        runner: where the tasks run; the result does not depend on it. None is this process.
        progress: told of the text in each pass.

    Raises:
        DataError: some of the corpus is raw.
    """

    def __init__(self, station: str, corpus: Corpus, runner: Runner | None, progress: ProgressReporter | None):
        self.station = station
        self.corpus = corpus
        self.paths = [_station_path(shard, station) for shard in corpus.shards()]
        self.where: TaskOptions = {"runner": runner or InProcess(), "progress": progress or NoProgress()}

    def run(
        self,
        out: Path,
        build: Callable[[Path], dict[str, Any]],
        *,
        settings: dict[str, Any],
        num_passes: int,
        inputs: Sequence[tuple[Path | str, str]] = (),
        summary: Callable[[dict[str, Any]], str] | None = None,
    ) -> StationResult:
        """Run `build`, which finds what goes and calls `write`, in the station's folder; see `run_station`.

        Args:
            out: folder to make.
            build: gets the folder and returns the counts.
            settings: JSON-ready settings that decide the outcome.
            num_passes: times that the whole text is read, for the progress.
            inputs: (path, fingerprint) of what is read besides the corpus.
            summary: a line for people, from the counts; None is `what_is_kept`.
        """
        progress = self.where["progress"]

        def shown(folder: Path) -> dict[str, Any]:
            progress.start(self.station, num_passes * self.corpus.text_mb, "MB")
            counts = build(folder)
            progress.finish((summary or what_is_kept)(counts))
            return counts

        inputs = [*self.corpus.inputs, *inputs]
        return run_station(self.station, out, inputs=inputs, settings=settings, build=shown, resumable=True)

    def write(self, folder: Path, function: TaskFunction, **common: Any) -> dict[str, Any]:
        """Run the writing tasks, one a shard, and add up what they report.

        Args:
            folder: the station's folder.
            function: calls `write_shard`; its task has the shard's `path` and what is in `common`.
        """
        tasks: list[Task] = [{"path": path, **common} for path in self.paths]
        reports = run_tasks(folder, "write", function, tasks, **self.where)
        return {name: add_counts(reports, name) for name in reports[0] if name != "megabytes"} if reports else {}


Config = TypeVar("Config", bound=Section)


@dataclass(frozen=True)
class FilterStation(Generic[Config]):
    """A station that takes documents away; calling it runs it."""

    name: str
    build: Callable[[Filtering, Path, Config], dict[str, Any]]
    """Finds what goes and calls `Filtering.write`, in the station's folder; returns the counts."""
    num_passes: int
    """Times that it reads the whole text."""
    inputs: Callable[[Config], Sequence[tuple[Path | str, str]]] = lambda config: ()
    """(path, fingerprint) of what it reads besides the corpus; asked, and may refuse, before there is a folder."""
    summary: Callable[[dict[str, Any]], str] | None = None
    """A line for people, from the counts; None is `what_is_kept`."""

    def __call__(
        self,
        corpus: Corpus,
        out: Path,
        config: Config,
        *,
        runner: Runner | None = None,
        progress: ProgressReporter | None = None,
    ) -> StationResult:
        """Run the station.

        Args:
            corpus: documents of an earlier station.
            out: folder to make.
            config: what goes; it decides the outcome together with the corpus.
            runner: where the tasks run; the result does not depend on it. None is this process.
            progress: told of the text as it is read and written.

        Raises:
            DataError: the input is raw, or what the station needs besides it is missing or cannot be read.
        """
        filtering = Filtering(self.name, corpus, runner, progress)
        return filtering.run(
            out,
            lambda folder: self.build(filtering, folder, config),
            settings=config.model_dump(mode="json"),
            num_passes=self.num_passes,
            inputs=self.inputs(config),
            summary=self.summary,
        )


def _station_path(shard: dict[str, Any], station: str) -> str:
    """The Parquet file of a shard that an earlier station wrote."""
    if "station" not in shard:
        raise DataError(
            f"{shard['root']}: raw files, and station {station!r} reads documents that a station wrote; run "
            "`megalite data clean` or `megalite data dedup` first, and give it their folder"
        )
    return shard["station"]


def write_shard(path: str, number: int, folder: Path, decide: Decide, *, schema: pa.Schema = REMOVED_SCHEMA) -> Report:
    """Write what stays of one shard.

    Args:
        path: a Parquet file that a station wrote.
        number: of the task.
        folder: the station's folder.
        decide: says what stays.
        schema: of removed/: REMOVED_SCHEMA or TWINS_SCHEMA.
    """
    sources: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    num_bytes, row = 0, 0
    removed = ShardWriter(folder / REMOVED_FOLDER / shard_name(number), schema)
    with ShardOutput(folder, number) as outcome, removed:
        for batch in ShardReading({"station": path}):
            documents, texts = batch.documents, batch.texts
            decision = decide(documents, texts, row)
            if decision.texts is not None:
                refuse_conversations(documents, f"this station {EDITS}")
                documents = with_texts(documents, decision.texts)
            if decision.metadata is not None:
                documents = with_column(documents, "metadata", decision.metadata)
            empty = (decision.texts or texts).lengths == 0
            keep = decision.keep & ~empty
            gone = pa.array(~keep)
            outcome.keep(documents.filter(pa.array(keep)))
            outcome.count_removed(int((~keep).sum()))
            why = np.where(decision.keep, "nothing is left", decision.reason)[~keep].tolist()
            details = np.array(decision.details or [""] * len(keep), dtype=object)[~keep].tolist()
            names = [documents.column(name).filter(gone) for name in ("id", "source")]
            columns = [*names, pa.array(why, ARROW_TYPE), pa.array(details, ARROW_TYPE)]
            if decision.twins is not None:
                columns += [column.combine_chunks().filter(gone) for column in decision.twins.columns]
            removed.write(pa.RecordBatch.from_arrays(columns, schema=schema))
            reasons.update(why)
            sources.update(names[1].to_pylist())
            num_bytes += texts.num_bytes
            row += len(texts)
    counts = outcome.counts()
    del counts["rejected"]  # nothing is unreadable in what a station wrote
    return {
        **counts,
        "text_bytes_in": num_bytes,
        "removed": dict(sorted(reasons.items())),
        "removed_by_source": dict(sorted(sources.items())),
        "megabytes": num_bytes / 1e6,
    }


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

    Raises:
        DataError: such a file is damaged.
    """
    order = np.argsort(shards, kind="stable")
    tables = [NAMES_SCHEMA.empty_table()]
    for shard in np.unique(shards).tolist():
        path = file_of(shard)
        try:
            with pa.memory_map(str(path)) as file:
                names = pa.ipc.open_file(file).read_all()
                tables.append(names.take(pa.array(rows[order][shards[order] == shard])).cast(NAMES_SCHEMA))
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{path}: damaged, or no names of documents ({error}); make its index anew") from error
    return pa.concat_tables(tables).take(pa.array(np.argsort(order))).combine_chunks()
