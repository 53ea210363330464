"""Stations that remove a part of a document, or the document because of a part, each by what `spans/` finds:

line-dedup        lines that stand in many documents                             spans/lines.py
substring-dedup   passages that stood earlier in the corpus (Lee et al. 2022)    spans/substring.py
url-dedup         documents from one page                                        spans/urls.py
decontaminate     documents that share runs of words with an evaluation set      spans/contamination.py
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from megalite.corpus.corpus import Corpus
from megalite.corpus.spans.contamination import ExampleIndex, find_overlaps, index_files
from megalite.corpus.spans.lines import count_lines_in_shards, find_lines, frequent_lines
from megalite.corpus.spans.removal import remove_lines, remove_overlaps, remove_repeats
from megalite.corpus.spans.settings import (
    DecontaminateConfig,
    LineDedupConfig,
    SubstringConfig,
    UrlDedupConfig,
    with_partitions,
)
from megalite.corpus.spans.substring import find_repeats_in_shards, load_spans
from megalite.corpus.spans.urls import find_repeated_urls_in_shards, load_repeats
from megalite.corpus.stations.filtering import Decision, Filtering, write_shard
from megalite.progress import NoProgress, ProgressReporter
from megalite.stations.hashes import hash_file
from megalite.stations.station import StationResult
from megalite.stations.tasks import Report, Runner, Task, add_counts
from megalite.texts import Texts


def line_dedup(
    corpus: Corpus,
    out: Path,
    config: LineDedupConfig,
    *,
    runner: Runner | None = None,
    progress: ProgressReporter | None = None,
) -> StationResult:
    """Run the station.

    Args:
        corpus: documents of an earlier station.
        out: folder to make.
        config: which lines go.
        runner: where the tasks run; the result does not depend on it. None is this process.
        progress: told of the text as it is read and written.

    Raises:
        DataError: the input is raw.
    """
    filtering = Filtering("line-dedup", corpus, runner, progress)
    settings = config.model_dump(mode="json")

    def build(folder: Path) -> dict[str, Any]:
        sized = with_partitions(config, corpus.text_mb * 1e6)
        count_lines_in_shards(folder, filtering.paths, sized, **filtering.where)
        return filtering.write(folder, cut_lines, config=sized.model_dump(mode="json"))

    return filtering.run(out, build, settings=settings, num_passes=2)


def cut_lines(task: Task, number: int, folder: Path) -> Report:
    """Task: cut the frequent lines out of a shard."""
    config = LineDedupConfig.model_validate(task["config"])
    frequent = frequent_lines(folder, number, config)

    def decide(documents: object, texts: Texts, row: int) -> Decision:
        removal = remove_lines(texts, find_lines(texts, frequent, config))
        return Decision(removal.is_kept, "frequent lines alone", removal.texts)

    return write_shard(task["path"], number, folder, decide)


def substring_dedup(
    corpus: Corpus,
    out: Path,
    config: SubstringConfig,
    *,
    runner: Runner | None = None,
    progress: ProgressReporter | None = None,
) -> StationResult:
    """Run the station.

    Args:
        corpus: documents of an earlier station.
        out: folder to make.
        config: how long a passage must be, and what becomes of it.
        runner: where the tasks run; the result does not depend on it. None is this process.
        progress: told of the text as it is read and written.

    Raises:
        DataError: the input is raw.
    """
    filtering = Filtering("substring-dedup", corpus, runner, progress)
    settings = config.model_dump(mode="json")

    def build(folder: Path) -> dict[str, Any]:
        sized = with_partitions(config, corpus.text_mb * 1e6)
        found = find_repeats_in_shards(folder, filtering.paths, sized, **filtering.where)
        counts = filtering.write(folder, cut_passages, config=settings)
        return {**counts, "repeated_bytes": add_counts(found, "repeated_bytes")}

    return filtering.run(out, build, settings=settings, num_passes=2)


def cut_passages(task: Task, number: int, folder: Path) -> Report:
    """Task: cut the repeated passages out of a shard, or drop the documents that have too many."""
    config = SubstringConfig.model_validate(task["config"])
    spans = load_spans(folder, number)

    def decide(documents: object, texts: Texts, row: int) -> Decision:
        own = spans[np.searchsorted(spans[:, 0], row) : np.searchsorted(spans[:, 0], row + len(texts))] - [row, 0, 0]
        removal = remove_repeats(texts, own, config)
        return Decision(removal.is_kept, "repeated passages", removal.texts)

    return write_shard(task["path"], number, folder, decide)


def url_dedup(
    corpus: Corpus,
    out: Path,
    config: UrlDedupConfig,
    *,
    runner: Runner | None = None,
    progress: ProgressReporter | None = None,
) -> StationResult:
    """Run the station.

    Args:
        corpus: documents of an earlier station whose sources kept the address (`keep_fields: [url]`).
        out: folder to make.
        config: when two addresses are one.
        runner: where the tasks run; the result does not depend on it. None is this process.
        progress: told of the text as it is written.

    Raises:
        DataError: the input is raw, or no document has an address.
    """
    filtering = Filtering("url-dedup", corpus, runner, progress)

    def build(folder: Path) -> dict[str, Any]:
        runner = filtering.where["runner"]
        sized = with_partitions(config, corpus.text_mb * 1e6)
        find_repeated_urls_in_shards(folder, filtering.paths, sized, runner=runner, progress=NoProgress())
        return filtering.write(folder, keep_first_of_address)

    return filtering.run(out, build, settings=config.model_dump(mode="json"), num_passes=1)


def keep_first_of_address(task: Task, number: int, folder: Path) -> Report:
    """Task: write the documents of a shard that stay."""
    repeats = load_repeats(folder, number)

    def decide(documents: object, texts: Texts, row: int) -> Decision:
        keep = np.ones(len(texts), bool)
        keep[repeats[np.searchsorted(repeats, row) : np.searchsorted(repeats, row + len(texts))] - row] = False
        return Decision(keep, "same address")

    return write_shard(task["path"], number, folder, decide)


def decontaminate(
    corpus: Corpus,
    out: Path,
    config: DecontaminateConfig,
    *,
    runner: Runner | None = None,
    progress: ProgressReporter | None = None,
) -> StationResult:
    """Run the station.

    Args:
        corpus: documents of an earlier station.
        out: folder to make.
        config: the evaluation sets, and what counts as a match.
        runner: where the tasks run; the result does not depend on it. None is this process.
        progress: told of the text as it is written.

    Raises:
        DataError: the input is raw, or an evaluation set cannot be read.
    """
    filtering = Filtering("decontaminate", corpus, runner, progress)
    index = index_files(config)

    def build(folder: Path) -> dict[str, Any]:
        counts = filtering.write(folder, clear_shard, config=config.model_dump_json())
        return {**counts, "examples": len(index.ids), "examples_too_short": index.num_too_short}

    inputs = [(path, hash_file(path)) for path in config.paths]
    return filtering.run(out, build, settings=config.model_dump(mode="json"), num_passes=1, inputs=inputs)


def clear_shard(task: Task, number: int, folder: Path) -> Report:
    """Task: drop the contaminated documents of a shard, or cut the matching words out of them."""
    config = DecontaminateConfig.model_validate_json(task["config"])
    index = _index_once(task["config"])

    def decide(documents: object, texts: Texts, row: int) -> Decision:
        overlaps = find_overlaps(texts, index)
        removal = remove_overlaps(texts, overlaps, config)
        examples = [index.ids[example] if example >= 0 else "" for example in overlaps.first_example.tolist()]
        return Decision(removal.is_kept, "contaminated", removal.texts, examples)

    return write_shard(task["path"], number, folder, decide)


@lru_cache(maxsize=1)
def _index_once(config: str) -> ExampleIndex:
    """A worker keeps the index from shard to shard."""
    return index_files(DecontaminateConfig.model_validate_json(config))
