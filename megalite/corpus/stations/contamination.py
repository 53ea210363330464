"""Station: documents that share runs of words with an evaluation set. How they match: `spans/contamination.py`."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from megalite.corpus.corpus import Corpus
from megalite.corpus.spans.contamination import ExampleIndex, find_overlaps, index_files
from megalite.corpus.spans.removal import remove_overlaps
from megalite.corpus.spans.settings import DecontaminateConfig
from megalite.corpus.stations.filtering import Decision, Filtering, write_shard
from megalite.progress import ProgressReporter
from megalite.stations.hashes import hash_file
from megalite.stations.station import StationResult
from megalite.stations.tasks import Report, Runner, Task
from megalite.texts import Texts


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
