"""Station: lines that stand in many documents. How they are counted: `spans/lines.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megalite.corpus.corpus import Corpus
from megalite.corpus.spans.lines import count_lines_in_shards, find_lines, frequent_lines
from megalite.corpus.spans.removal import remove_lines
from megalite.corpus.spans.settings import LineDedupConfig, with_partitions
from megalite.corpus.stations.filtering import Decision, Filtering, write_shard
from megalite.progress import ProgressReporter
from megalite.stations.station import StationResult
from megalite.stations.tasks import Report, Runner, Task
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
        return filtering.write(folder, cut_shard, config=sized.model_dump(mode="json"))

    return filtering.run(out, build, settings=settings, num_passes=2)


def cut_shard(task: Task, number: int, folder: Path) -> Report:
    """Task: cut the frequent lines out of a shard."""
    config = LineDedupConfig.model_validate(task["config"])
    frequent = frequent_lines(folder, number, config)

    def decide(documents: object, texts: Texts, row: int) -> Decision:
        removal = remove_lines(texts, find_lines(texts, frequent, config))
        return Decision(removal.is_kept, "frequent lines alone", removal.texts)

    return write_shard(task["path"], number, folder, decide)
