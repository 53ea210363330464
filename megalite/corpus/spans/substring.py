"""Repeated passages of a whole corpus, out of core: three phases of tasks, or in memory for texts that are at hand.

    shards     0           1           2          files of documents, in this order
                |           |           |
    windows    runs, text  runs, text  runs, text per shard: runs of windows by partition, and the text flat
                |___________|___________|
    repeats    part 0      part 1      ...        per partition: groups of runs compared, passages that stood earlier
                |___________|___________|
    spans      spans       spans       spans      per shard: passages of all partitions merged

No task needs the corpus in memory, nor an index of it: `windows` holds a row group and 20 bytes for each run of about
25 windows, `repeats` one partition's share of those and the text of the runs that have a partner, `spans` the passages
of a shard. On disk there is, while it runs, the text once more (so that any byte of it can be mapped) and about as much
for the runs. How windows and runs work stands in `windows.py`, what exactly counts as repeated in `repeats.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megalite.corpus.spans.partitioned import Partitions, read_partition, save_array
from megalite.corpus.spans.reading import Shard, read_texts, slices
from megalite.corpus.spans.settings import SubstringConfig, partitions_of
from megalite.progress import ProgressReporter
from megalite.stations.tasks import WORK_FOLDER, Report, Runner, Task, replacing, run_tasks
from megalite.texts import Texts

WINDOWS_PHASE = "substring-windows"
REPEATS_PHASE = "substring-repeats"
SPANS_PHASE = "substring-spans"

SLICE_BYTES = 2_000_000
"""Text whose runs are listed at once when all of it is in memory."""

SHARD_SHIFT = 40
"""A place in the corpus is shard << 40 | byte of the shard: it sorts as the corpus runs."""


def find_repeats(texts: Texts, config: SubstringConfig) -> np.ndarray:
    """Every byte that stood earlier, as part of the same min_bytes bytes.

    Args:
        texts: all of them, in order.
        config: settings.

    Returns:
        Merged spans, int64 [n, 3]: text, first byte, byte behind the last.
    """
    from megalite.corpus.spans.repeats import repeated_passages, spans_of_passages
    from megalite.corpus.spans.windows import RUN, window_runs

    num_partitions = partitions_of(config, texts.num_bytes)
    begin = texts.offsets[0]
    parts = Partitions(RUN, num_partitions)
    for _, part in slices(texts, SLICE_BYTES):
        runs = window_runs(part, config.min_bytes, part.offsets[0] - begin)
        parts.add(runs, runs["key"])
    copy_bytes = _BytesOf([texts.buffer[begin : texts.offsets[-1]]])
    found = [
        repeated_passages(parts.rows(partition), config.min_bytes, copy_bytes) for partition in range(num_partitions)
    ]
    del parts, runs  # their memory serves the sorting
    return spans_of_passages(np.concatenate(found), texts.offsets - begin)


def find_repeats_in_shards(
    folder: Path, shards: Sequence[Shard], config: SubstringConfig, *, runner: Runner, progress: ProgressReporter
) -> list[Report]:
    """The same for a corpus in files, as resumable tasks.

    Args:
        folder: the station's folder; `load_spans` finds the result there.
        shards: files that `read_texts` reads, in the order of the corpus.
        config: settings, their number of partitions filled in (`with_partitions`) by the size of the corpus.
        runner: where the tasks run.
        progress: told of the megabytes read.

    Returns:
        A report for each shard: `documents`, `bytes`, `repeated_bytes`.
    """
    num_partitions = partitions_of(config)
    windows = [{"shard": shard, "min_bytes": config.min_bytes, "num_partitions": num_partitions} for shard in shards]
    sizes = run_tasks(folder, WINDOWS_PHASE, list_windows, windows, runner=runner, progress=progress)
    repeats = [{"num_shards": len(shards), "min_bytes": config.min_bytes}] * num_partitions
    run_tasks(folder, REPEATS_PHASE, compare_windows, repeats, runner=runner, progress=progress)
    merges = [{"num_partitions": num_partitions}] * len(shards)
    reports = run_tasks(folder, SPANS_PHASE, collect_spans, merges, runner=runner, progress=progress)
    return [{**size, **report} for size, report in zip(sizes, reports, strict=True)]


def load_spans(folder: Path, shard: int) -> np.ndarray:
    """The merged spans of one shard, int64 [n, 3]: document of the shard, first byte, byte behind the last."""
    return np.load(_work(folder, SPANS_PHASE) / f"{shard:05d}.npy")


def list_windows(task: Task, number: int, folder: Path) -> Report:
    """Task: read a shard; write its text flat, where its documents begin, and its runs of windows."""
    from megalite.corpus.spans.windows import RUN, window_runs

    work = _work(folder, WINDOWS_PHASE)
    parts, lengths, num_bytes = Partitions(RUN, task["num_partitions"]), [np.zeros(1, np.int64)], 0
    with replacing(work / f"{number:05d}.text") as path, open(path, "wb") as file:
        for texts in read_texts(task["shard"]):
            runs = window_runs(texts, task["min_bytes"], number << SHARD_SHIFT | num_bytes)
            parts.add(runs, runs["key"])
            lengths.append(texts.lengths)
            file.write(texts.buffer[texts.offsets[0] : texts.offsets[-1]].data)
            num_bytes += texts.num_bytes
    parts.save(work / f"{number:05d}.rows")
    offsets = np.cumsum(np.concatenate(lengths))
    save_array(work / f"{number:05d}.offsets.npy", offsets)
    return {"documents": offsets.size - 1, "bytes": num_bytes, "megabytes": num_bytes / 1e6}


def compare_windows(task: Task, number: int, folder: Path) -> Report:
    """Task: compare the windows of one partition; write the repeated passages, sorted by shard."""
    from megalite.corpus.spans.repeats import PASSAGE, repeated_passages
    from megalite.corpus.spans.windows import RUN

    work, num_shards = _work(folder, WINDOWS_PHASE), task["num_shards"]
    runs = read_partition([work / f"{shard:05d}.rows" for shard in range(num_shards)], RUN, number)
    copy_bytes = _BytesOf([_mapped(work / f"{shard:05d}.text") for shard in range(num_shards)])
    passages = repeated_passages(runs, task["min_bytes"], copy_bytes)
    by_shard = Partitions(PASSAGE, num_shards)
    by_shard.add(passages, (passages[:, 0] >> SHARD_SHIFT).astype(np.uint64))
    by_shard.save(_work(folder, REPEATS_PHASE) / f"{number:05d}.rows")
    return {"passages": len(passages)}


def collect_spans(task: Task, number: int, folder: Path) -> Report:
    """Task: merge the passages that all partitions found in one shard."""
    from megalite.corpus.spans.repeats import PASSAGE, spans_of_passages

    work = _work(folder, REPEATS_PHASE)
    paths = [work / f"{partition:05d}.rows" for partition in range(task["num_partitions"])]
    passages = read_partition(paths, PASSAGE, number)
    offsets = np.load(_work(folder, WINDOWS_PHASE) / f"{number:05d}.offsets.npy")
    spans = spans_of_passages(passages & ((1 << SHARD_SHIFT) - 1), offsets)
    save_array(_work(folder, SPANS_PHASE) / f"{number:05d}.npy", spans)
    return {"repeated_bytes": int((spans[:, 2] - spans[:, 1]).sum())}


class _BytesOf:
    """Copies the bytes of runs out of texts that are mapped or in memory; the runs may come in any order."""

    def __init__(self, shards: Sequence[np.ndarray]):
        self._shards = shards

    def __call__(self, firsts: np.ndarray, lengths: np.ndarray, buffer: np.ndarray, targets: np.ndarray) -> None:
        from megalite.corpus.spans.repeats import copy_ranges

        order = np.argsort(firsts)  # a mapped file is read from front to back
        shard_of = firsts[order] >> SHARD_SHIFT
        borders = np.searchsorted(shard_of, np.arange(len(self._shards) + 1))
        places = firsts & ((1 << SHARD_SHIFT) - 1)
        for shard, text in enumerate(self._shards):
            rows = order[borders[shard] : borders[shard + 1]]
            if rows.size:
                copy_ranges(text, places[rows], lengths[rows], buffer, targets[rows])


def _mapped(path: Path) -> np.ndarray:
    return np.memmap(path, np.uint8, mode="r") if path.stat().st_size else np.zeros(0, np.uint8)


def _work(folder: Path, phase: str) -> Path:
    return folder / WORK_FOLDER / phase
