"""Near-duplicate removal as tasks, out of core: shards of documents in, masks out.

    sign     a shard      texts -> signatures, band keys                    index/00000.*.npy
    match    a partition  equal band keys side by side -> checked pairs     .work/edges/
    cluster  once         pairs -> clusters, who stays                      .work/clusters/
    mask     a shard      -> keep, cluster                                  masks/00000.*.npy

`sign` needs memory for a row group and for the band keys of its shard (1.4 kB a document), `match` for some 50
bytes an entry of its partition and BLOCK_BYTES of signatures, `cluster` for 56 bytes a document that has a
near-duplicate. None grows with the corpus otherwise. The masks do not depend on the number of partitions or of workers.

`index/` is worth keeping: give it as `older` with the next batch of data, and that is compared with this one too.
Documents of older data always win and are never removed. The index holds all documents, not only those that stayed, so
the same of a new batch stay as if all data so far came at once, the older first. (What it cannot know is a later
document that is like one here and one there: an earlier choice is not taken back.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megalite.corpus.near.index import Index, shard_file, write_index_file
from megalite.corpus.near.phases import (
    INDEX_FOLDER,
    MASKS_FOLDER,
    Shard,
    cluster_documents,
    mask_shard,
    match_partition,
    read_ids,
    sign_shard,
)
from megalite.corpus.near.report import NearReport
from megalite.corpus.near.settings import NearDedupConfig
from megalite.errors import DataError
from megalite.progress import ProgressReporter
from megalite.stations.tasks import Report, Runner, Task, add_counts, run_tasks

EARLIER_DATA = "earlier data"
"""Name of a document of an older index, which holds no names."""

MIN_PARTITIONS = 8
"""So that some workers have something to do on small data."""

ENTRIES_PER_PARTITION = 1 << 23
"""Band keys in a partition at most: some 450 MB while they are sorted."""


@dataclass(frozen=True)
class NearMask:
    """The outcome for one shard."""

    keep: np.ndarray
    """bool [documents]"""
    cluster: np.ndarray
    """int64 [documents]: number of the document that stays of its cluster, -1 for one that has no near-duplicate.
    Documents are numbered through: those of `older` first, in the order of the folders, then shard by shard."""


def find_near_duplicates(
    shards: Sequence[Shard],
    folder: Path,
    config: NearDedupConfig,
    *,
    runner: Runner,
    progress: ProgressReporter,
    older: Sequence[Path] = (),
    source_names: Sequence[str] = (),
    num_partitions: int | None = None,
) -> NearReport:
    """Mark the near-duplicates of a corpus; goes on where it was after an interruption.

    Args:
        shards: the documents, see `shards.py`.
        folder: gets index/ and masks/ (read them with `read_mask`); .work/ may go when this returns.
        config: what counts as the same.
        runner: where the tasks run.
        progress: told of the text that is signed.
        older: index folders of earlier data, which always wins.
        source_names: names of the codes in the shards' `sources`.
        num_partitions: tasks that group the band keys; None takes what fits in memory. No byte depends on it.

    Raises:
        DataError: a shard cannot be read, lacks its scores, or an index was made with other settings.
    """
    for shard in shards:
        if config.keep == "best" and not shard.get("scores"):
            raise DataError(
                f"{shard['path']} comes without scores, and keep=best goes by them; give them or keep=longest"
            )
    settings = config.model_dump(mode="json")
    tasks: list[Task] = [{"shard": shard, "config": settings} for shard in shards]
    signed = run_tasks(folder, "sign", sign_shard, tasks, runner=runner, progress=progress)
    write_index_file(folder / INDEX_FOLDER, config, [report["documents"] for report in signed])

    folders = [*(str(path.resolve()) for path in older), str((folder / INDEX_FOLDER).resolve())]
    index = Index([Path(path) for path in folders], config)
    partitions = num_partitions or default_partitions(index.num_documents, config)
    common: Task = {"config": settings, "index": folders, "num_new_shards": len(shards), "num_partitions": partitions}
    tasks = [{**common, "partition": partition} for partition in range(partitions)]
    phase = f"match-{partitions}"  # tasks of another number of partitions are other tasks
    matched = run_tasks(folder, phase, match_partition, tasks, runner=runner, progress=progress)
    tasks = [{**common, "scores": [shard.get("scores") for shard in shards]}]
    (clusters,) = run_tasks(folder, "cluster", cluster_documents, tasks, runner=runner, progress=progress)
    tasks = [{**common, "sources": shard.get("sources")} for shard in shards]
    masked = run_tasks(folder, "mask", mask_shard, tasks, runner=runner, progress=progress)
    reports = {"sign": signed, "match": matched, "mask": masked}
    return _report(shards, index, clusters, reports, source_names)


def read_mask(folder: Path, shard: int) -> NearMask:
    """The outcome for one shard, of the folder given to `find_near_duplicates`."""
    return NearMask(*(np.load(shard_file(folder / MASKS_FOLDER, shard, name)) for name in ("keep", "cluster")))


def default_partitions(num_documents: int, config: NearDedupConfig) -> int:
    """So many that the band keys of one fit in memory."""
    return max(MIN_PARTITIONS, math.ceil(num_documents * config.banding.bands / ENTRIES_PER_PARTITION))


def _report(
    shards: Sequence[Shard],
    index: Index,
    clusters: Report,
    reports: dict[str, list[Report]],
    source_names: Sequence[str],
) -> NearReport:
    """The reports of all tasks as one."""
    signed, matched, masked = reports["sign"], reports["match"], reports["mask"]
    return NearReport(
        documents=add_counts(signed, "documents"),
        kept=add_counts(masked, "kept"),
        text_bytes=add_counts(signed, "text_bytes"),
        kept_bytes=add_counts(masked, "kept_bytes"),
        without_words=add_counts(signed, "without_words"),
        removed_by_source=_by_source(masked, source_names),
        comparisons=add_counts(matched, "comparisons"),
        examples=[_name_documents(shards, index, numbers) for numbers in clusters["examples"]],
        **{name: clusters[name] for name in ("clusters", "largest_cluster", "cluster_sizes")},
    )


def _by_source(masked: Sequence[Report], source_names: Sequence[str]) -> dict[str, int]:
    """Removed documents by the name of their source."""
    by_code = {int(code): count for code, count in add_counts(masked, "removed_by_code").items()} if masked else {}
    if by_code and max(by_code) >= len(source_names):
        raise DataError(f"source code {max(by_code)} has no name; there are {len(source_names)} source names")
    return {source_names[code]: by_code[code] for code in sorted(by_code)}


def _name_documents(shards: Sequence[Shard], index: Index, numbers: list[int]) -> list[str]:
    """Ids of some documents, in their order."""
    first_shard = index.num_shards - len(shards)
    names: list[str] = []
    for shard, part in index.split(np.array(numbers)):
        rows = (np.array(numbers)[part] - index.starts[shard]).tolist()
        names += read_ids(shards[shard - first_shard], rows) if shard >= first_shard else [EARLIER_DATA] * len(rows)
    return names
