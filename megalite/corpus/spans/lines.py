"""Lines that stand in many documents, out of core: count by key, then remove all their occurrences.

    shards       0          1          2
    count     |key n|    |key n|    |key n|       per shard: documents that hold each line, sorted by partition
                 |  ______/  ________/
    frequent  part 0     part 1     ...           per partition: keys with enough documents in the whole corpus
                 |  ______/
    shards    read again: lines with a frequent key are the spans to cut   (`frequent_lines`, while a station filters)

Web pages share menus, cookie notices and "read more" lines, too short for passages and each of little worth. A line
counts once a document; all occurrences go, the first too (CCNet, Wenzek et al. 2020, removes paragraphs like this).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megalite.corpus.spans.partitioned import Partitions, read_partition, save_array
from megalite.corpus.spans.reading import Shard, read_texts
from megalite.corpus.spans.settings import LineDedupConfig, partitions_of, with_partitions
from megalite.progress import ProgressReporter
from megalite.stations.tasks import WORK_FOLDER, Report, Runner, Task, run_tasks
from megalite.texts import Texts

COUNT_PHASE = "lines-count"
FREQUENT_PHASE = "lines-frequent"

LINE_COUNT = np.dtype([("key", np.uint64), ("documents", np.int64)])
"""A line's key and how many documents hold the line."""


def count_lines(texts: Texts, config: LineDedupConfig) -> np.ndarray:
    """In how many of the texts each line stands: LINE_COUNT [distinct lines], sorted by key."""
    from megalite.corpus.spans.line_keys import line_keys

    keys, documents, _, _ = line_keys(texts.buffer, texts.offsets, config.min_chars, config.fold_digits)
    order = np.argsort(keys, kind="stable")
    keys, documents = keys[order], documents[order]
    is_first = np.ones(keys.size, bool)
    is_first[1:] = (keys[1:] != keys[:-1]) | (documents[1:] != documents[:-1])
    counts = np.empty(np.count_nonzero(is_first), LINE_COUNT)
    counts["key"], counts["documents"] = keys[is_first], 1
    return _add(counts)


def find_lines(texts: Texts, frequent: np.ndarray, config: LineDedupConfig) -> np.ndarray:
    """Where the frequent lines stand.

    Args:
        texts: some of the corpus.
        frequent: uint64, sorted: keys of the lines to remove.
        config: the settings by which the lines were counted.

    Returns:
        Merged spans of whole lines, int64 [n, 3]: text, first byte, byte behind the line feed.
    """
    from megalite.corpus.spans.cutting import merge_spans
    from megalite.corpus.spans.line_keys import line_keys

    keys, documents, starts, ends = line_keys(texts.buffer, texts.offsets, config.min_chars, config.fold_digits)
    found = is_member(keys, frequent)
    return merge_spans(np.stack([documents[found], starts[found], ends[found]], axis=1))


def count_lines_in_shards(
    folder: Path, shards: Sequence[Shard], config: LineDedupConfig, *, runner: Runner, progress: ProgressReporter
) -> None:
    """Count the lines of a corpus in files, as resumable tasks; `frequent_lines` reads the result.

    Args:
        folder: the station's folder.
        shards: files that `read_texts` reads.
        config: settings, their number of partitions filled in (`with_partitions`) by the size of the corpus.
        runner: where the tasks run.
        progress: told of the megabytes read.
    """
    config = with_partitions(config, 0)
    settings = config.model_dump(mode="json")
    tasks = [{"shard": shard, "settings": settings} for shard in shards]
    run_tasks(folder, COUNT_PHASE, count_shard, tasks, runner=runner, progress=progress)
    if config.scope == "corpus":
        sums = [{"num_shards": len(shards), "min_occurrences": config.min_occurrences}] * partitions_of(config)
        run_tasks(folder, FREQUENT_PHASE, find_frequent, sums, runner=runner, progress=progress)


def frequent_lines(folder: Path, shard: int, config: LineDedupConfig) -> np.ndarray:
    """Keys of the lines to remove from a shard, uint64, sorted. With scope `corpus` they are the same for all."""
    if config.scope == "shard":
        counts = np.fromfile(_work(folder, COUNT_PHASE) / f"{shard:05d}.rows", LINE_COUNT)
        return np.sort(counts["key"][counts["documents"] >= config.min_occurrences])
    work = _work(folder, FREQUENT_PHASE)
    return np.sort(np.concatenate([np.load(work / f"{part:05d}.npy") for part in range(partitions_of(config))]))


def count_shard(task: Task, number: int, folder: Path) -> Report:
    """Task: count the lines of one shard."""
    config = LineDedupConfig.model_validate(task["settings"])
    counts, num_bytes = [np.zeros(0, LINE_COUNT)], 0
    for texts in read_texts(task["shard"]):
        counts.append(count_lines(texts, config))
        num_bytes += texts.num_bytes
    total = _add(np.concatenate(counts))
    parts = Partitions(LINE_COUNT, partitions_of(config))
    parts.add(total, total["key"])
    parts.save(_work(folder, COUNT_PHASE) / f"{number:05d}.rows")
    return {"lines": int(total["documents"].sum()), "megabytes": num_bytes / 1e6}


def find_frequent(task: Task, number: int, folder: Path) -> Report:
    """Task: add up one partition's counts over all shards; write the keys with enough documents."""
    work = _work(folder, COUNT_PHASE)
    paths = [work / f"{shard:05d}.rows" for shard in range(task["num_shards"])]
    total = _add(read_partition(paths, LINE_COUNT, number))
    frequent = total["key"][total["documents"] >= task["min_occurrences"]]
    save_array(_work(folder, FREQUENT_PHASE) / f"{number:05d}.npy", frequent)
    return {"frequent_lines": int(frequent.size)}


def is_member(keys: np.ndarray, members: np.ndarray) -> np.ndarray:
    """Which keys are among some sorted ones, bool [keys]."""
    if not members.size:
        return np.zeros(keys.size, bool)
    place = np.minimum(np.searchsorted(members, keys), members.size - 1)
    return members[place] == keys


def _add(counts: np.ndarray) -> np.ndarray:
    """Rows with one key added up, sorted by key."""
    counts = counts[np.argsort(counts["key"], kind="stable")]
    is_first = np.ones(counts.size, bool)
    is_first[1:] = counts["key"][1:] != counts["key"][:-1]
    total = counts[is_first]
    if total.size:
        total["documents"] = np.add.reduceat(counts["documents"], np.flatnonzero(is_first))
    return total


def _work(folder: Path, phase: str) -> Path:
    return folder / WORK_FOLDER / phase
