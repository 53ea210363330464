"""Station 2: exact deduplication. Of documents with the same normalised text the first is kept.

    hash     a shard      text -> normalise -> xxh3_128, 16 bytes a document     .work/hashes/
    match    a partition  equal hashes side by side; all but the first go        .work/removed/
    keep     a shard      kept -> part-*.parquet; removed -> clusters/part-*.parquet, with what each repeats

Hashes are shared out by their first bits, so no task holds more than its partition of them: some 60 bytes a document.
Among n documents two that differ get one hash with probability n^2 / 2^129: about 1e-19 for ten billion.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from megalite.corpus.corpus import Corpus
from megalite.corpus.documents import ARROW_TYPE, ShardOutput, ShardWriter, shard_name, what_is_kept
from megalite.corpus.near.report import size_histogram
from megalite.corpus.recipe import DedupConfig
from megalite.corpus.shards import ShardReading, lost_counts, lost_in_words, refuse_unreadable
from megalite.corpus.stations.filtering import look_up, write_names
from megalite.progress import NoProgress, ProgressReporter
from megalite.stations.runners import InProcess
from megalite.stations.station import StationResult, run_station
from megalite.stations.tasks import WORK_FOLDER, Report, Runner, Task, add_counts, replacing, run_tasks
from megalite.texts import Texts

CLUSTERS_FOLDER = "clusters"

CLUSTERS_SCHEMA = pa.schema([(name, ARROW_TYPE) for name in ("removed_id", "removed_source", "kept_id", "kept_source")])

NUM_SLICES = 4096
"""A shard's hashes are sorted; those with the same first 12 bits are a slice. A partition is a run of slices of all
shards."""

SLICE_SHIFT = 64 - 12

DOCUMENTS_PER_PARTITION = 1 << 24
"""Hashes that one task compares: about a gigabyte of memory."""

SHARD_SHIFT = 40
"""A document's number is its shard, shifted so far, plus its row: numbers grow in the order of the corpus."""


def dedup(
    corpus: Corpus,
    out: Path,
    config: DedupConfig,
    *,
    runner: Runner | None = None,
    progress: ProgressReporter | None = None,
) -> StationResult:
    """Run the station.

    Args:
        corpus: what to read.
        out: folder to make.
        config: what counts as the same.
        runner: where the tasks run; the result does not depend on it. None is this process.
        progress: told of both passes.

    Raises:
        DataError: a source cannot be read at all.
    """
    progress, runner = progress or NoProgress(), runner or InProcess()
    settings = config.model_dump(mode="json")
    shards = corpus.shards()

    def build(folder: Path) -> dict[str, Any]:
        progress.start("dedup", 2 * corpus.text_mb, "MB")
        tasks: list[Task] = [{"shard": shard, "config": settings} for shard in shards]
        hashed = run_tasks(folder, "hash", hash_shard, tasks, runner=runner, progress=progress)
        refuse_unreadable([(shard, report["reading"]) for shard, report in zip(shards, hashed, strict=True)])
        tasks = _partitions(add_counts(hashed, "documents"), len(shards))
        matched = run_tasks(folder, "match", match_partition, tasks, runner=runner, progress=progress)
        tasks = [{"shard": shard, "partitions": len(tasks)} for shard in shards]
        kept = run_tasks(folder, "keep", keep_shard, tasks, runner=runner, progress=progress)
        names = ("documents_in", "documents", "text_bytes_in", "text_bytes", "rejected")
        counts = {name: add_counts(kept, name) for name in names}
        counts["clusters"] = add_counts(matched, "clusters")
        counts["largest_cluster"] = max((report["largest_cluster"] for report in matched), default=0)
        counts["cluster_sizes"] = add_counts(matched, "cluster_sizes")
        counts["removed_by_source"] = add_counts(kept, "removed_by_source")
        counts |= lost_counts(hashed, corpus.passed_over)
        progress.finish(what_is_kept(counts) + lost_in_words(counts))
        return counts

    return run_station("dedup", out, inputs=corpus.inputs, settings=settings, build=build, resumable=True)


def hash_texts(texts: Texts, config: DedupConfig) -> np.ndarray:
    """xxh3_128 of each text in the form that is compared, uint64 [documents, 2]."""
    if config.ignore_case:
        texts = Texts.of(text.casefold() for text in texts)
    if config.ignore_whitespace:
        from megalite.corpus.blanks import squeeze  # brings numba, which takes a second to import

        texts = squeeze(texts)
    memory = np.ascontiguousarray(texts.buffer).data
    ends = texts.offsets.tolist()
    digests = b"".join(xxhash.xxh3_128_digest(memory[a:b]) for a, b in itertools.pairwise(ends))
    return np.frombuffer(digests, np.uint64).reshape(-1, 2)


def first_occurrences(hashes: np.ndarray) -> np.ndarray:
    """For each document the index of the first one with its hash.

    Args:
        hashes: uint64 [documents, 2].
    """
    order = np.lexsort((hashes[:, 0], hashes[:, 1]))
    in_order = hashes[order]
    begins = np.ones(len(order), dtype=np.bool_)
    begins[1:] = (in_order[1:] != in_order[:-1]).any(axis=1)
    heads = order[begins]
    first_of = np.empty(len(order), dtype=np.int64)
    first_of[order] = heads[np.cumsum(begins) - 1]
    return first_of


def hash_shard(task: Task, number: int, folder: Path) -> Report:
    """Task: hash the documents of a shard, and note their names."""
    config = DedupConfig.model_validate(task["config"])
    reading = ShardReading(task["shard"])
    hashes, names = [np.zeros((0, 2), np.uint64)], []
    num_bytes = 0
    for batch in reading:
        hashes.append(hash_texts(batch.texts, config))
        names.append(batch.documents.select(["id", "source"]))
        num_bytes += batch.texts.num_bytes
    joined = np.concatenate(hashes)
    order = np.argsort(joined[:, 0])
    numbered = np.concatenate([joined, np.arange(len(joined), dtype=np.uint64)[:, None]], axis=1)[order]
    with replacing(_work_file(folder, "hashes", number, "npy")) as path, open(path, "wb") as file:
        np.save(file, numbered)
    write_names(_work_file(folder, "names", number, "arrow"), names)
    return {"documents": len(joined), "reading": reading.report(), "megabytes": num_bytes / 1e6}


def match_partition(task: Task, number: int, folder: Path) -> Report:
    """Task: find the documents of a partition that repeat an earlier one.

    Writes int64 [removed, 2]: numbers of the removed document and of the first one like it, sorted.
    """
    first, last = (slice_ << SLICE_SHIFT for slice_ in task["slices"])
    hashes, numbers = [np.zeros((0, 2), np.uint64)], [np.zeros(0, np.int64)]
    for shard in range(task["num_shards"]):
        saved = np.load(_work_file(folder, "hashes", shard, "npy"), mmap_mode="r")
        begin = np.searchsorted(saved[:, 0], np.uint64(first))
        end = len(saved) if last >> 64 else np.searchsorted(saved[:, 0], np.uint64(last))
        hashes.append(saved[begin:end, :2])
        numbers.append((shard << SHARD_SHIFT) + saved[begin:end, 2].astype(np.int64))
    of_all = np.concatenate(numbers)
    in_order = np.argsort(of_all)  # the earliest document of a cluster is then its first
    of_all = of_all[in_order]
    first_of = first_occurrences(np.concatenate(hashes)[in_order])
    repeats = first_of != np.arange(first_of.size)
    with replacing(_work_file(folder, "removed", number, "npy")) as path, open(path, "wb") as file:
        np.save(file, np.stack([of_all[repeats], of_all[first_of[repeats]]], axis=1))
    sizes = np.bincount(first_of, minlength=1)
    return {
        "clusters": int((sizes > 1).sum()),
        "largest_cluster": int(sizes.max()),
        "cluster_sizes": size_histogram(sizes[sizes > 1]),
    }


def keep_shard(task: Task, number: int, folder: Path) -> Report:
    """Task: write the documents of a shard that stay, and the names of those that do not."""
    removed = _removed_of(folder, number, task["partitions"])
    rows = removed[:, 0] - (number << SHARD_SHIFT)
    sources: Counter[str] = Counter()
    num_bytes = 0
    start = 0
    with ShardOutput(folder, number) as outcome:
        for batch in ShardReading(task["shard"]):
            stop = start + len(batch.documents)
            keep = np.ones(len(batch.documents), bool)
            keep[rows[np.searchsorted(rows, start) : np.searchsorted(rows, stop)] - start] = False
            outcome.reject(batch.rejected)
            outcome.keep(batch.documents.filter(pa.array(keep)))
            outcome.count_removed(int((~keep).sum()))
            sources.update(batch.documents.column("source").filter(pa.array(~keep)).to_pylist())
            num_bytes += batch.texts.num_bytes
            start = stop
    _write_clusters(folder, number, removed)
    by_source = dict(sorted(sources.items()))
    counts = {**outcome.counts(), "text_bytes_in": num_bytes}
    return {**counts, "removed_by_source": by_source, "megabytes": num_bytes / 1e6}


def _partitions(num_documents: int, num_shards: int) -> list[Task]:
    """Runs of slices of about DOCUMENTS_PER_PARTITION documents."""
    count = min(max(1, -(-num_documents // DOCUMENTS_PER_PARTITION)), NUM_SLICES)
    borders = np.linspace(0, NUM_SLICES, count + 1).astype(int).tolist()
    return [{"slices": [a, b], "num_shards": num_shards} for a, b in itertools.pairwise(borders)]


def _removed_of(folder: Path, shard: int, num_partitions: int) -> np.ndarray:
    """The removed documents of a shard with the first like them, sorted: int64 [removed, 2]."""
    found = []
    for partition in range(num_partitions):
        pairs = np.load(_work_file(folder, "removed", partition, "npy"), mmap_mode="r")
        begin, end = np.searchsorted(pairs[:, 0], [shard << SHARD_SHIFT, (shard + 1) << SHARD_SHIFT])
        found.append(pairs[begin:end])
    pairs = np.concatenate(found)
    return pairs[np.argsort(pairs[:, 0])]


def _write_clusters(folder: Path, number: int, removed: np.ndarray) -> None:
    """The names of removed documents beside those they repeat."""
    with ShardWriter(folder / CLUSTERS_FOLDER / shard_name(number), CLUSTERS_SCHEMA) as writer:
        if len(removed):
            columns = [*_names(folder, removed[:, 0]), *_names(folder, removed[:, 1])]
            writer.write(pa.RecordBatch.from_arrays(columns, schema=CLUSTERS_SCHEMA))


def _names(folder: Path, numbers: np.ndarray) -> Iterator[pa.Array]:
    """Ids and sources of documents, by their numbers."""
    shards, rows = numbers >> SHARD_SHIFT, numbers & ((1 << SHARD_SHIFT) - 1)
    table = look_up(shards, rows, lambda shard: _work_file(folder, "names", shard, "arrow"))
    return (column.combine_chunks() for column in table.columns)


def _work_file(folder: Path, kind: str, number: int, suffix: str) -> Path:
    return folder / WORK_FOLDER / kind / f"{number:05d}.{suffix}"
