"""Stations that remove a part of a document, or the document because of a part, each by what `spans/` finds:

line-dedup        lines that stand in many documents                             spans/lines.py
substring-dedup   passages that stood earlier in the corpus (Lee et al. 2022)    spans/substring.py
url-dedup         documents from one page, where sources kept the address        spans/urls.py
decontaminate     documents that share runs of words with an evaluation set      spans/contamination.py
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

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
from megalite.corpus.stations.filtering import Decision, Filtering, FilterStation, write_shard
from megalite.progress import NoProgress
from megalite.stations.hashes import hash_inputs
from megalite.stations.tasks import Report, Task, add_counts
from megalite.texts import Texts


def _line_dedup(filtering: Filtering, folder: Path, config: LineDedupConfig) -> dict[str, Any]:
    sized = with_partitions(config, filtering.corpus.text_mb * 1e6)
    count_lines_in_shards(folder, filtering.paths, sized, **filtering.where)
    return filtering.write(folder, cut_lines, config=sized.model_dump(mode="json"))


def cut_lines(task: Task, number: int, folder: Path) -> Report:
    """Task: cut the frequent lines out of a shard."""
    config = LineDedupConfig.model_validate(task["config"])
    frequent = frequent_lines(folder, number, config)

    def decide(documents: object, texts: Texts, row: int) -> Decision:
        removal = remove_lines(texts, find_lines(texts, frequent, config))
        return Decision(removal.is_kept, "frequent lines alone", removal.texts)

    return write_shard(task["path"], number, folder, decide)


def _substring_dedup(filtering: Filtering, folder: Path, config: SubstringConfig) -> dict[str, Any]:
    sized = with_partitions(config, filtering.corpus.text_mb * 1e6)
    found = find_repeats_in_shards(folder, filtering.paths, sized, **filtering.where)
    counts = filtering.write(folder, cut_passages, config=config.model_dump(mode="json"))
    return {**counts, "repeated_bytes": add_counts(found, "repeated_bytes")}


def cut_passages(task: Task, number: int, folder: Path) -> Report:
    """Task: cut the repeated passages out of a shard, or drop the documents that have too many."""
    config = SubstringConfig.model_validate(task["config"])
    spans = load_spans(folder, number)

    def decide(documents: object, texts: Texts, row: int) -> Decision:
        own = spans[np.searchsorted(spans[:, 0], row) : np.searchsorted(spans[:, 0], row + len(texts))] - [row, 0, 0]
        removal = remove_repeats(texts, own, config)
        return Decision(removal.is_kept, "repeated passages", removal.texts if config.action == "cut" else None)

    return write_shard(task["path"], number, folder, decide)


def _url_dedup(filtering: Filtering, folder: Path, config: UrlDedupConfig) -> dict[str, Any]:
    sized = with_partitions(config, filtering.corpus.text_mb * 1e6)
    runner = filtering.where["runner"]
    find_repeated_urls_in_shards(folder, filtering.paths, sized, runner=runner, progress=NoProgress())
    return filtering.write(folder, keep_first_of_address)


def keep_first_of_address(task: Task, number: int, folder: Path) -> Report:
    """Task: write the documents of a shard that stay."""
    repeats = load_repeats(folder, number)

    def decide(documents: object, texts: Texts, row: int) -> Decision:
        keep = np.ones(len(texts), bool)
        keep[repeats[np.searchsorted(repeats, row) : np.searchsorted(repeats, row + len(texts))] - row] = False
        return Decision(keep, "same address")

    return write_shard(task["path"], number, folder, decide)


def _decontaminate(filtering: Filtering, folder: Path, config: DecontaminateConfig) -> dict[str, Any]:
    settings, hashes = config.model_dump_json(), " ".join(found for _, found in _files(config))
    counts = filtering.write(folder, clear_shard, config=settings, hashes=hashes)
    index = _index_once(settings, hashes)
    return {**counts, "examples": len(index.ids), "examples_too_short": index.num_too_short}


def _evaluation_sets(config: DecontaminateConfig) -> list[tuple[Path | str, str]]:
    """The files of the evaluation sets, which are read once to see that they can be."""
    index_files(config)
    return _files(config)


def _files(config: DecontaminateConfig) -> list[tuple[Path | str, str]]:
    return [each for path in config.paths for each in hash_inputs(path)]


def clear_shard(task: Task, number: int, folder: Path) -> Report:
    """Task: drop the contaminated documents of a shard, or cut the matching words out of them."""
    config = DecontaminateConfig.model_validate_json(task["config"])
    index = _index_once(task["config"], task["hashes"])

    def decide(documents: object, texts: Texts, row: int) -> Decision:
        overlaps = find_overlaps(texts, index)
        removal = remove_overlaps(texts, overlaps, config)
        examples = [index.ids[example] if example >= 0 else "" for example in overlaps.first_example.tolist()]
        cut = removal.texts if config.action == "cut" else None
        return Decision(removal.is_kept, "contaminated", cut, examples)

    return write_shard(task["path"], number, folder, decide)


@lru_cache(maxsize=1)
def _index_once(config: str, _hashes: str) -> ExampleIndex:
    """A worker keeps the index from shard to shard, as long as the evaluation sets are the same."""
    return index_files(DecontaminateConfig.model_validate_json(config))


line_dedup = FilterStation("line-dedup", _line_dedup, num_passes=2)
substring_dedup = FilterStation("substring-dedup", _substring_dedup, num_passes=2)
url_dedup = FilterStation("url-dedup", _url_dedup, num_passes=1)
decontaminate = FilterStation("decontaminate", _decontaminate, num_passes=1, inputs=_evaluation_sets)
