"""Station: passages that stood earlier in the corpus (Lee et al. 2022). How they are found: `spans/substring.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from megalite.corpus.corpus import Corpus
from megalite.corpus.spans.removal import remove_repeats
from megalite.corpus.spans.settings import SubstringConfig, with_partitions
from megalite.corpus.spans.substring import find_repeats_in_shards, load_spans
from megalite.corpus.stations.filtering import Decision, Filtering, write_shard
from megalite.progress import ProgressReporter
from megalite.stations.station import StationResult
from megalite.stations.tasks import Report, Runner, Task, add_counts
from megalite.texts import Texts


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
        counts = filtering.write(folder, cut_shard, config=settings)
        return {**counts, "repeated_bytes": add_counts(found, "repeated_bytes")}

    return filtering.run(out, build, settings=settings, num_passes=2)


def cut_shard(task: Task, number: int, folder: Path) -> Report:
    """Task: cut the repeated passages out of a shard, or drop the documents that have too many."""
    config = SubstringConfig.model_validate(task["config"])
    spans = load_spans(folder, number)

    def decide(documents: object, texts: Texts, row: int) -> Decision:
        own = spans[np.searchsorted(spans[:, 0], row) : np.searchsorted(spans[:, 0], row + len(texts))] - [row, 0, 0]
        removal = remove_repeats(texts, own, config)
        return Decision(removal.is_kept, "repeated passages", removal.texts)

    return write_shard(task["path"], number, folder, decide)
