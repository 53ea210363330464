"""Station: documents from one page. How addresses are compared: `spans/urls.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from megalite.corpus.corpus import Corpus
from megalite.corpus.spans.settings import UrlDedupConfig, with_partitions
from megalite.corpus.spans.urls import find_repeated_urls_in_shards, load_repeats
from megalite.corpus.stations.filtering import Decision, Filtering, write_shard
from megalite.progress import NoProgress, ProgressReporter
from megalite.stations.station import StationResult
from megalite.stations.tasks import Report, Runner, Task
from megalite.texts import Texts


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
        return filtering.write(folder, keep_shard)

    return filtering.run(out, build, settings=config.model_dump(mode="json"), num_passes=1)


def keep_shard(task: Task, number: int, folder: Path) -> Report:
    """Task: write the documents of a shard that stay."""
    repeats = load_repeats(folder, number)

    def decide(documents: object, texts: Texts, row: int) -> Decision:
        keep = np.ones(len(texts), bool)
        keep[repeats[np.searchsorted(repeats, row) : np.searchsorted(repeats, row + len(texts))] - row] = False
        return Decision(keep, "same address")

    return write_shard(task["path"], number, folder, decide)
