"""Spherical k-means of embeddings as tasks: learnt from a sample, then every document is assigned.

    sample        once        some rows, spread evenly over all           kmeans/sample.npy, centroids-000.npy
    nearest-000   a chunk     the nearest centroid of each                kmeans/nearest-000/00000.npy
    centroids-000 once        the mean of each cluster, of length 1       kmeans/centroids-001.npy
    ...                       until nobody moves, or `iterations` are over
    assign        a chunk     of all documents: cluster, sorted by it     assigned/00000.*.npy

Chunks are ranges of rows, whatever the shards, and means are added up in fp64 in the order of the rows, so the outcome
is the same however many workers there are. A cluster that has lost all its rows begins anew at the row that lies
farthest from its own centroid.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megalite.corpus.near.index import RowsWriter, save_array
from megalite.corpus.semantic.nearest import nearest_centroids, similarities
from megalite.corpus.semantic.settings import SemanticDedupConfig
from megalite.progress import NoProgress, ProgressReporter
from megalite.stations.tasks import WORK_FOLDER, Report, Runner, Task, run_tasks

CHUNK_BYTES = 1 << 26
"""Of embeddings in one task, and in memory at once, in fp32."""


def learn_clusters(
    folder: Path,
    embeddings: Path,
    config: SemanticDedupConfig,
    *,
    runner: Runner,
    progress: ProgressReporter,
    text_mb: float,
) -> dict[str, int]:
    """Find the centroids, and assign every document to one.

    Args:
        folder: the station's folder.
        embeddings: the file of the embeddings, [documents, n].
        config: with the number of clusters filled in.
        runner: where the tasks run.
        progress: told of one pass over the text.
        text_mb: million bytes of text in that pass.

    Returns:
        What there is to say: `iterations`, and `largest`, the documents of the largest cluster.
    """
    where: dict[str, Any] = {"runner": runner, "progress": progress}
    alone: dict[str, Any] = {"runner": runner, "progress": NoProgress()}
    common: Task = {"embeddings": str(embeddings), "config": config.model_dump(mode="json")}
    (sampled,) = run_tasks(folder, "sample", draw_sample, [common], **alone)
    ranges = chunks(sampled["rows"], sampled["width"])
    common["megabytes"] = text_mb / config.iterations / len(ranges)
    iteration, moved = 0, 1
    while moved and iteration < config.iterations:
        tasks = [{**common, "iteration": iteration, "rows": rows} for rows in ranges]
        reports = run_tasks(folder, f"nearest-{iteration:03d}", assign_sample, tasks, **where)
        moved = sum(report["moved"] for report in reports)
        if moved:
            task = {**common, "iteration": iteration, "chunks": len(tasks)}
            run_tasks(folder, f"centroids-{iteration:03d}", move_centroids, [task], **alone)
            iteration += 1
    progress.advance(text_mb * (1 - iteration / config.iterations))
    vectors = np.load(embeddings, mmap_mode="r")
    tasks = [{**common, "iteration": iteration, "rows": rows} for rows in chunks(*vectors.shape)]
    run_tasks(folder, "assign", assign_documents, tasks, **alone)
    return {"iterations": iteration, "largest": int(cluster_sizes(folder, config).max())}


def chunks(num_rows: int, width: int) -> list[list[int]]:
    """Ranges of rows, about CHUNK_BYTES each."""
    size = max(1, CHUNK_BYTES // (4 * width))
    return [[begin, min(begin + size, num_rows)] for begin in range(0, num_rows, size)]


def draw_sample(task: Task, number: int, folder: Path) -> Report:
    """Task: the rows to learn from, and some of them as the first centroids."""
    config = SemanticDedupConfig(**task["config"])
    assert config.clusters is not None
    vectors = np.load(task["embeddings"], mmap_mode="r")
    rows = sample_rows(len(vectors), config.clusters * config.sample_per_cluster, config.seed)
    with RowsWriter(_file(folder, "sample"), np.float32, vectors.shape[1:]) as writer:
        for begin, end in chunks(rows.size, vectors.shape[1]):
            writer.write(np.asarray(vectors[rows[begin:end]], np.float32))
    chosen = np.random.default_rng(config.seed).choice(rows.size, config.clusters, replace=False)
    first = np.asarray(vectors[rows[np.sort(chosen)]], np.float32)
    save_array(_centroids_file(folder, 0), first)
    return {"rows": rows.size, "width": vectors.shape[1]}


def sample_rows(num_rows: int, wanted: int, seed: int) -> np.ndarray:
    """Rows of a sample, int64, rising: one at random of each of `wanted` equal stretches, or all of fewer."""
    if num_rows <= wanted:
        return np.arange(num_rows)
    borders = num_rows * np.arange(wanted + 1) // wanted
    places = np.random.default_rng(seed).random(wanted)
    return borders[:-1] + (places * np.diff(borders)).astype(np.int64)


def assign_sample(task: Task, number: int, folder: Path) -> Report:
    """Task: the nearest centroid of each row of a chunk of the sample."""
    begin, end = task["rows"]
    vectors = np.load(_file(folder, "sample"), mmap_mode="r")[begin:end]
    nearest = nearest_centroids(vectors, np.load(_centroids_file(folder, task["iteration"])))
    before = _nearest_file(folder, task["iteration"] - 1, number)
    moved = int((nearest != np.load(before)).sum()) if task["iteration"] else nearest.size
    save_array(_nearest_file(folder, task["iteration"], number), nearest)
    return {"moved": moved, "megabytes": task["megabytes"]}


def move_centroids(task: Task, number: int, folder: Path) -> Report:
    """Task: each centroid to the mean of its rows."""
    old = np.load(_centroids_file(folder, task["iteration"]))
    sample = np.load(_file(folder, "sample"), mmap_mode="r")
    sums, counts, row = np.zeros(old.shape, np.float64), np.zeros(len(old), np.int64), 0
    farness = [np.zeros(0)]
    for chunk in range(task["chunks"]):
        nearest = np.load(_nearest_file(folder, task["iteration"], chunk))
        vectors = np.asarray(sample[row : row + nearest.size])
        order = np.argsort(nearest, kind="stable")
        found, begins, num_rows = np.unique(nearest[order], return_index=True, return_counts=True)
        sums[found] += np.add.reduceat(vectors[order], begins, axis=0, dtype=np.float64)
        counts[found] += num_rows
        farness.append(-similarities(vectors, old[nearest]))
        row += nearest.size
    empty = np.flatnonzero(counts == 0)
    sums[empty] = sample[np.sort(np.argsort(-np.concatenate(farness), kind="stable")[: empty.size])]
    norms = np.linalg.norm(sums, axis=1, keepdims=True)
    new = np.where(norms > 0, sums / np.where(norms > 0, norms, 1.0), old)
    save_array(_centroids_file(folder, task["iteration"] + 1), new.astype(np.float32))
    return {"empty": empty.size}


def assign_documents(task: Task, number: int, folder: Path) -> Report:
    """Task: the cluster of each document of a chunk. Writes rows, clusters and farness, sorted by cluster, then row."""
    begin, end = task["rows"]
    vectors = np.asarray(np.load(task["embeddings"], mmap_mode="r")[begin:end])
    centroids = np.load(_centroids_file(folder, task["iteration"]))
    clusters = nearest_centroids(vectors, centroids)
    order = np.argsort(clusters, kind="stable")
    farness = -similarities(vectors, centroids[clusters])
    arrays = {"rows": begin + order, "clusters": clusters[order], "farness": farness[order]}
    for name, array in arrays.items():
        save_array(_assigned_file(folder, number, name), array)
    return {}


def cluster_sizes(folder: Path, config: SemanticDedupConfig) -> np.ndarray:
    """Documents of each cluster, int64 [clusters]."""
    assert config.clusters is not None
    sizes = np.zeros(config.clusters, np.int64)
    for path in _assigned_files(folder):
        sizes += np.bincount(np.load(path, mmap_mode="r"), minlength=config.clusters)
    return sizes


def members(folder: Path, cluster: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a cluster, rising, int64 [documents], and how far each is from the centroid, float64 [documents]."""
    rows, farness = [np.zeros(0, np.int64)], [np.zeros(0)]
    for path in _assigned_files(folder):
        begin, end = np.searchsorted(np.load(path, mmap_mode="r"), [cluster, cluster + 1])
        for name, found in (("rows", rows), ("farness", farness)):
            found.append(np.load(path.with_name(path.name.replace("clusters", name)), mmap_mode="r")[begin:end])
    return np.concatenate(rows), np.concatenate(farness)


def _assigned_files(folder: Path) -> Iterator[Path]:
    return iter(sorted((folder / WORK_FOLDER / "assigned").glob("*.clusters.npy")))


def _assigned_file(folder: Path, number: int, name: str) -> Path:
    return folder / WORK_FOLDER / "assigned" / f"{number:06d}.{name}.npy"


def _file(folder: Path, name: str) -> Path:
    return folder / WORK_FOLDER / "kmeans" / f"{name}.npy"


def _centroids_file(folder: Path, iteration: int) -> Path:
    return _file(folder, f"centroids-{iteration:03d}")


def _nearest_file(folder: Path, iteration: int, number: int) -> Path:
    return folder / WORK_FOLDER / "kmeans" / f"nearest-{iteration:03d}" / f"{number:06d}.npy"
