"""Who goes: in each cluster the documents that are near an earlier one, in the order of who is to stay.

    pairs     some stripes   rows of a cluster, in that order -> who is near whom      pairs/00000.npy
    settle    once           -> for whom each went, and who of those stays             links.npy

This is the rule of SemDeDup (Abbas et al. 2023, section 3): a document goes when any before it is near, whether that
one stays or not. Each is noted with the first that it is near (its *twin*), and with the one that stays, to which twins
of twins lead.

A stripe is some rows of one cluster, which are compared with all rows before them, a block at a time. So a task needs
memory for two blocks and their products, and 40 bytes a document of its cluster, and a cluster of everything is as many
tasks as its pairs are worth.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megalite.corpus.near.index import save_array
from megalite.corpus.near.report import MAX_NAMED, NUM_EXAMPLES, size_histogram
from megalite.corpus.semantic.kmeans import cluster_sizes, members
from megalite.corpus.semantic.nearest import first_near, similarities
from megalite.corpus.semantic.settings import SemanticDedupConfig
from megalite.progress import NoProgress, ProgressReporter
from megalite.stations.tasks import WORK_FOLDER, Report, Runner, Task, add_counts, run_tasks

BLOCK_ROWS, BLOCK_COLUMNS = 1 << 9, 1 << 10
"""Of products at once: when all are near, their list takes some 100 bytes each, 50 MB."""

PRODUCTS_PER_TASK = 1 << 33
"""About a minute of a core with 768 numbers a vector."""

LINKS = np.dtype([("row", np.int64), ("twin", np.int64), ("kept", np.int64), ("similarity", np.float64)])
"""A document that goes: its row, that of its twin, that of the one that stays for it, and how near the twin is."""


def find_semantic_duplicates(
    folder: Path,
    embeddings: Path,
    lengths: Path,
    config: SemanticDedupConfig,
    *,
    runner: Runner,
    progress: ProgressReporter,
    text_mb: float,
) -> dict[str, Any]:
    """Find who goes, after `learn_clusters`.

    Args:
        folder: the station's folder.
        embeddings: [documents, n].
        lengths: int64 [documents], bytes of the texts.
        config: with the number of clusters filled in.
        runner: where the tasks run.
        progress: told of one pass over the text.
        text_mb: million bytes of text in that pass.

    Returns:
        Counts of the groups of documents that are near (`clusters`, `largest_cluster`, `cluster_sizes`), `example_rows`
        of some, and `comparisons`.
    """
    common: Task = {
        "embeddings": str(embeddings),
        "lengths": str(lengths),
        "config": config.model_dump(mode="json"),
    }
    groups = list(stripes(cluster_sizes(folder, config)))
    common["megabytes"] = text_mb / max(1, len(groups))
    tasks = [{**common, "stripes": group} for group in groups]
    compared = run_tasks(folder, "pairs", compare_stripes, tasks, runner=runner, progress=progress)
    (settled,) = run_tasks(folder, "settle", settle, [{"parts": len(tasks)}], runner=runner, progress=NoProgress())
    return {**settled, "comparisons": add_counts(compared, "comparisons")}


def stripes(sizes: np.ndarray) -> Iterator[list[list[int]]]:
    """Groups of [cluster, first, last]: rows that one task compares with those before them.

    Args:
        sizes: int64 [clusters].
    """
    group: list[list[int]] = []
    products = 0
    for cluster in np.flatnonzero(sizes > 1).tolist():
        for first in range(0, int(sizes[cluster]), BLOCK_ROWS):
            last = min(first + BLOCK_ROWS, int(sizes[cluster]))
            if group and group[-1][0] == cluster:
                group[-1][2] = last
            else:
                group.append([cluster, first, last])
            products += (last - first) * last
            if products >= PRODUCTS_PER_TASK:
                yield group
                group, products = [], 0
    if group:
        yield group


def compare_stripes(task: Task, number: int, folder: Path) -> Report:
    """Task: who goes of some stripes, with twins and similarities."""
    config = SemanticDedupConfig(**task["config"])
    vectors = np.load(task["embeddings"], mmap_mode="r")
    lengths = np.load(task["lengths"], mmap_mode="r")
    found, comparisons = [np.zeros(0, LINKS)], 0
    for cluster, first, last in task["stripes"]:
        order = keep_order(*members(folder, cluster), lengths, config)
        for begin in range(first, last, BLOCK_ROWS):
            end = min(begin + BLOCK_ROWS, last)
            links, products = _compare(vectors, order, begin, end, config.threshold)
            found.append(links)
            comparisons += products
    save_array(_pairs_file(folder, number), np.concatenate(found))
    return {"comparisons": comparisons, "megabytes": task["megabytes"]}


def keep_order(rows: np.ndarray, farness: np.ndarray, lengths: np.ndarray, config: SemanticDedupConfig) -> np.ndarray:
    """Rows of a cluster in the order of who is to stay, int64 [documents].

    Args:
        rows: int64 [documents], rising.
        farness: float64 [documents], from the centroid.
        lengths: int64 [all documents], bytes of the texts.
        config: says which.
    """
    if config.keep == "first":
        return rows
    worth = farness if config.keep == "farthest" else lengths[rows]
    return rows[np.argsort(-worth, kind="stable")]


def _compare(vectors: np.ndarray, order: np.ndarray, begin: int, end: int, threshold: float) -> tuple[np.ndarray, int]:
    """The links of order[begin:end], each to the first row before it that it is near, and the number of products."""
    block = np.asarray(vectors[order[begin:end]], np.float32)
    twins = np.full(end - begin, -1, np.int64)
    products = 0
    for start in range(0, end, BLOCK_COLUMNS):
        stop = min(start + BLOCK_COLUMNS, end)
        left = np.flatnonzero(twins < 0)
        if not left.size:
            break
        columns = np.asarray(vectors[order[start:stop]], np.float32)
        near = first_near(block[left], columns, threshold, begin + left - start)
        twins[left] = np.where(near >= 0, start + near, -1)
        products += left.size * (stop - start)
    gone = np.flatnonzero(twins >= 0)
    links = np.zeros(gone.size, LINKS)
    links["row"], links["twin"] = order[begin + gone], order[twins[gone]]
    links["similarity"] = similarities(block[gone], np.asarray(vectors[links["twin"]], np.float32))
    return links, products


def settle(task: Task, number: int, folder: Path) -> Report:
    """Task: who stays for each that goes, and how large the groups are. It holds 60 bytes for each that goes."""
    parts = [np.zeros(0, LINKS), *(np.load(_pairs_file(folder, part)) for part in range(task["parts"]))]
    links = np.concatenate(parts)
    links = links[np.argsort(links["row"], kind="stable")]
    links["kept"] = follow(links["row"], links["twin"])
    save_array(links_file(folder), links)
    kept, others = np.unique(links["kept"], return_counts=True)
    largest_first = np.argsort(-others, kind="stable")
    places = np.linspace(0, kept.size - 1, min(NUM_EXAMPLES, kept.size)).astype(np.int64)
    return {
        "clusters": kept.size,
        "largest_cluster": int(others.max(initial=-1)) + 1,
        "cluster_sizes": size_histogram(others + 1) if kept.size else {},
        "example_rows": [_example(links, row) for row in kept[largest_first[np.unique(places)]].tolist()],
    }


def follow(rows: np.ndarray, twins: np.ndarray) -> np.ndarray:
    """The row at the end of each chain of twins, int64 [documents].

    Args:
        rows: int64 [documents], rising: those that go.
        twins: int64 [documents]: whom each is near.
    """
    ends = twins.copy()
    while rows.size:
        places = np.minimum(np.searchsorted(rows, ends), rows.size - 1)
        goes_on = rows[places] == ends
        if not goes_on.any():
            break
        ends = np.where(goes_on, ends[places], ends)  # chains of half the length with every round
    return ends


def links_of(folder: Path, first: int, stop: int) -> np.ndarray:
    """The links of documents from one row to another, LINKS."""
    links = np.load(links_file(folder), mmap_mode="r")
    begin, end = np.searchsorted(links["row"], [first, stop])
    return np.asarray(links[begin:end])


def links_file(folder: Path) -> Path:
    """Where all links are, by rising row."""
    return folder / WORK_FOLDER / "links.npy"


def _example(links: np.ndarray, kept: int) -> list[int]:
    return [kept, *links["row"][links["kept"] == kept][: MAX_NAMED - 1].tolist()]


def _pairs_file(folder: Path, number: int) -> Path:
    return folder / WORK_FOLDER / "pairs" / f"{number:06d}.npy"
