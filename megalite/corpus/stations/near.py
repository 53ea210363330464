"""Station: near-duplicates (MinHash LSH, verified). How they are found stands in `near/station.py`."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megalite.corpus.corpus import Corpus
from megalite.corpus.documents import read_numbers, what_is_kept
from megalite.corpus.near.index import INDEX_FILE, Index, names_file
from megalite.corpus.near.phases import INDEX_FOLDER, MASKS_FOLDER
from megalite.corpus.near.settings import NearDedupConfig
from megalite.corpus.near.station import EARLIER_DATA, find_near_duplicates, read_mask
from megalite.corpus.stations.filtering import TWINS_SCHEMA, Decision, Filtering, look_up, write_names, write_shard
from megalite.errors import DataError
from megalite.progress import NoProgress, ProgressReporter
from megalite.stations.station import StationResult
from megalite.stations.tasks import WORK_FOLDER, Report, Runner, Task, add_counts, replacing, run_tasks
from megalite.texts import Texts

REPORTED = ("clusters", "largest_cluster", "cluster_sizes", "examples", "comparisons", "without_words")
"""Of what was found, the counts of the station."""


def near_dedup(
    corpus: Corpus,
    out: Path,
    config: NearDedupConfig,
    *,
    older: Sequence[Path] = (),
    keep_index: bool = False,
    runner: Runner | None = None,
    progress: ProgressReporter | None = None,
) -> StationResult:
    """Run the station, which takes the same as a `FilterStation`, and

    Args:
        older: `index` folders of earlier data, whose documents always win.
        keep_index: leave `index/` (about 1.3 kB a document) for the next batch of data.

    Raises:
        DataError: the input is raw, an index was made with other settings, or no document has a score to go by.
    """
    filtering = Filtering("near-dedup", corpus, runner, progress)

    def build(folder: Path) -> dict[str, Any]:
        shards = [{"path": path} for path in filtering.paths]
        if config.keep == "best":
            tasks = [{"path": path, "field": config.score_field} for path in filtering.paths]
            scored = run_tasks(
                folder, "score", score_shard, tasks, runner=filtering.where["runner"], progress=NoProgress()
            )
            _refuse_unscored(add_counts(scored, "documents"), add_counts(scored, "scored"), config.score_field)
            shards = [{**shard, "scores": _scores_file(folder, number)} for number, shard in enumerate(shards)]
        run_tasks(folder, "names", name_shard, shards, runner=filtering.where["runner"], progress=NoProgress())
        found = asdict(find_near_duplicates(shards, folder, config, older=older, **filtering.where))
        settings = config.model_dump(mode="json")
        counts = filtering.write(folder, keep_shard, config=settings, older=[str(path.resolve()) for path in older])
        shutil.rmtree(folder / MASKS_FOLDER, ignore_errors=True)
        if not keep_index:
            shutil.rmtree(folder / INDEX_FOLDER, ignore_errors=True)
        return {**counts, **{name: found[name] for name in REPORTED}}

    return filtering.run(
        out,
        build,
        settings={**config.model_dump(mode="json"), "keep_index": keep_index},
        num_passes=2,
        inputs=[(index, _fingerprint(index)) for index in older],
        summary=lambda counts: f"{what_is_kept(counts)}, {counts['clusters']:,} clusters",
    )


def score_shard(task: Task, number: int, folder: Path) -> Report:
    """Task: take the scores of a shard's documents out of their metadata."""
    field, sign = task["field"].removeprefix("-"), -1.0 if task["field"].startswith("-") else 1.0
    column = pq.read_table(task["path"], columns=["metadata"]).column(0)
    scores = sign * read_numbers(column, field)
    with replacing(Path(_scores_file(folder, number))) as path, open(path, "wb") as file:
        np.save(file, scores)
    return {"documents": scores.size, "scored": int(np.isfinite(scores).sum())}


def name_shard(task: Task, number: int, folder: Path) -> Report:
    """Task: note the names of a shard's documents beside its index."""
    names = pq.read_table(task["path"], columns=["id", "source"], use_threads=False).to_batches()
    write_names(names_file(folder / INDEX_FOLDER, number), names)
    return {}


def keep_shard(task: Task, number: int, folder: Path) -> Report:
    """Task: write the documents of a shard that stay, and beside those that do not the one that stayed for them."""
    mask = read_mask(folder, number)
    folders = [*map(Path, task["older"]), folder / INDEX_FOLDER]
    index = Index(folders, NearDedupConfig(**task["config"]))

    def decide(documents: pa.RecordBatch, texts: Texts, row: int) -> Decision:
        rows = slice(row, row + len(documents))
        keep = np.asarray(mask.keep[rows])
        twins = _names(index, np.where(keep, -1, mask.cluster[rows]))
        details = [f"repeats {name or EARLIER_DATA}" for name in twins["id"].to_pylist()]
        return Decision(keep, "near-duplicate", details=details, twins=twins)

    return write_shard(task["path"], number, folder, decide, schema=TWINS_SCHEMA)


def _names(index: Index, documents: np.ndarray) -> pa.Table:
    """Ids and sources of documents; empty ones for -1, and where an index of earlier data has no names.

    Args:
        index: of earlier data and this one.
        documents: int64 [documents], their numbers.
    """
    shards = np.searchsorted(index.starts, documents, side="right") - 1
    with_names = [shard for shard in np.unique(shards).tolist() if shard >= 0 and index.names_file(shard).exists()]
    known = np.isin(shards, with_names)
    found = look_up(shards[known], (documents - index.starts[shards])[known], index.names_file)
    nobody = pa.Table.from_pylist([{"id": "", "source": ""}], schema=found.schema)
    places = np.where(known, np.cumsum(known) - 1, len(found))
    return pa.concat_tables([found, nobody]).take(pa.array(places))


def _refuse_unscored(num_documents: int, num_scored: int, field: str) -> None:
    if num_documents and not num_scored:
        raise DataError(
            f"keep=best goes by score_field={field!r}, and none of {num_documents:,} documents has that in its "
            "metadata; carry it along with keep_fields where the documents are read, add it with `megalite data "
            "classifier` or `perplexity`, or set keep=longest"
        )


def _scores_file(folder: Path, number: int) -> str:
    return str(folder / WORK_FOLDER / "scores" / f"{number:05d}.npy")


def _fingerprint(index: Path) -> str:
    """Sizes and times of the files of an index."""
    import xxhash

    if not (index / INDEX_FILE).is_file():
        raise DataError(f"{index}: {INDEX_FILE} is missing; name the index folder that an earlier near-dedup has left")
    files = sorted(path for path in index.iterdir() if path.is_file())
    return xxhash.xxh3_128_hexdigest(str([(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]).encode())
