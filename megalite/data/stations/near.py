"""Station: near-duplicates (MinHash LSH, verified). How they are found stands in `near/station.py`."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from megalite.data.corpus import Corpus
from megalite.data.manifest import StationResult
from megalite.data.near.phases import INDEX_FOLDER, MASKS_FOLDER
from megalite.data.near.settings import NearDedupConfig
from megalite.data.near.station import find_near_duplicates, read_mask
from megalite.data.progress import Progress
from megalite.data.stations.filtering import Decision, Filtering, documents_kept, write_shard
from megalite.data.tasks import Report, Runner, Task

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
    progress: Progress | None = None,
) -> StationResult:
    """Run the station.

    Args:
        corpus: documents of an earlier station.
        out: folder to make.
        config: what counts as the same, and who stays.
        older: `index` folders of earlier data, whose documents always win.
        keep_index: leave `index/` (about 1.3 kB a document) for the next batch of data.
        runner: where the tasks run; the result does not depend on it. None is this process.
        progress: told of the text as it is signed and written.

    Raises:
        DataError: the input is raw, or an index was made with other settings.
    """
    filtering = Filtering("near-dedup", corpus, runner, progress)

    def build(folder: Path) -> dict[str, Any]:
        shards = [{"path": path} for path in filtering.paths]
        found = asdict(find_near_duplicates(shards, folder, config, older=older, **filtering.where))
        counts = filtering.write(folder, keep_shard)
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
        summary=lambda counts: f"{documents_kept(counts)}, {counts['clusters']:,} clusters",
    )


def keep_shard(task: Task, number: int, folder: Path) -> Report:
    """Task: write the documents of a shard that stay."""
    mask = read_mask(folder, number)

    def decide(documents: object, texts: object, row: int) -> Decision:
        rows = slice(row, row + len(documents))
        details = [f"cluster {cluster}" for cluster in mask.cluster[rows].tolist()]
        return Decision(np.asarray(mask.keep[rows]), "near-duplicate", details=details)

    return write_shard(task["path"], number, folder, decide)


def _fingerprint(index: Path) -> str:
    """Sizes and times of the files of an index."""
    import xxhash

    files = sorted(path for path in index.iterdir() if path.is_file())
    return xxhash.xxh3_128_hexdigest(str([(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]).encode())
