"""Clusters against faiss's own k-means, pairs against all products; under a limit of memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megalite.corpus.semantic.kmeans import members, sample_rows
from megalite.corpus.semantic.nearest import first_near, nearest_centroids
from megalite.corpus.semantic.pairs import follow, stripes
from tests.corpus.semantic.truth import families, find, published, unit

faiss = pytest.importorskip("faiss")

ROUNDING = 1e-5
"""Between centroids that are added up in fp32 and in fp64."""


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Many chunks, stripes, blocks and tasks, all of which have borders."""
    monkeypatch.setattr("megalite.corpus.semantic.kmeans.CHUNK_BYTES", 5000)
    monkeypatch.setattr("megalite.corpus.semantic.pairs.BLOCK_ROWS", 16)
    monkeypatch.setattr("megalite.corpus.semantic.pairs.BLOCK_COLUMNS", 24)
    monkeypatch.setattr("megalite.corpus.semantic.pairs.PRODUCTS_PER_TASK", 3000)
    monkeypatch.setattr("megalite.corpus.semantic.nearest.PAIRS_AT_ONCE", 7)


def final_centroids(folder: Path) -> np.ndarray:
    return np.load(sorted((folder / ".work/kmeans").glob("centroids-*.npy"))[-1])


@pytest.mark.parametrize("keep", ["farthest", "longest", "first"])
@pytest.mark.parametrize("clusters", [1, 5])
def test_who_goes_is_what_all_products_say(tmp_path, clusters: int, keep: str):
    """By the published rule, computed in fp64 over each whole cluster (over everything with one); each has its twin,
    the first that it is near, how near, and who stays for both. No decision hangs on the last bits."""
    vectors = families(300).astype(np.float16 if keep == "first" else np.float32)
    lengths = np.random.default_rng(1).integers(10, 20, len(vectors))
    threshold = 0.9
    exact = vectors.astype(np.float64) @ vectors.astype(np.float64).T
    assert np.abs(exact - threshold).min() > 1e-6
    links, counts = find(tmp_path / "work", vectors, lengths, clusters=clusters, keep=keep, threshold=threshold)

    centroids = final_centroids(tmp_path / "work").astype(np.float64)
    nearest = (vectors.astype(np.float64) @ centroids.T).argmax(axis=1)
    wanted: set[int] = set()
    for cluster in range(clusters):
        rows = np.flatnonzero(nearest == cluster)
        assert rows.tolist() == members(tmp_path / "work", cluster)[0].tolist()
        farness = -(vectors[rows].astype(np.float64) @ centroids[cluster])
        worth = {"farthest": farness, "longest": lengths[rows], "first": -rows}[keep]
        order = rows[np.lexsort((rows, -worth))]
        gone = published(vectors, order, threshold)
        place = {int(row): number for number, row in enumerate(order)}
        for link in links[np.isin(links["row"], rows)]:
            earlier = order[: place[int(link["row"])]]
            assert link["twin"] == earlier[np.argmax(exact[link["row"], earlier] >= threshold)]
            assert link["similarity"] == pytest.approx(exact[link["row"], link["twin"]], abs=1e-12)
            assert link["kept"] in order
            assert link["kept"] not in gone
        wanted |= gone
    assert links["row"].tolist() == sorted(wanted)
    assert len(wanted) > 50
    kept, sizes = np.unique(links["kept"], return_counts=True)
    assert (counts["clusters"], counts["largest_cluster"]) == (kept.size, sizes.max() + 1)
    assert sum(counts["cluster_sizes"].values()) == kept.size
    assert all(set(example) - {example[0]} <= wanted for example in counts["example_rows"])


def test_clusters_are_those_of_faiss(tmp_path):
    """From the same first centroids, after as many rounds, faiss's own spherical k-means is where this one is."""
    vectors = families(400, seed=3)
    find(tmp_path / "work", vectors, np.ones(400), clusters=6, iterations=4)
    first = np.load(tmp_path / "work/.work/kmeans/centroids-000.npy")
    theirs = faiss.Kmeans(
        vectors.shape[1], 6, niter=4, spherical=True, min_points_per_centroid=1, max_points_per_centroid=400
    )
    theirs.train(vectors, init_centroids=first)
    assert np.abs(theirs.centroids - final_centroids(tmp_path / "work")).max() < ROUNDING
    _, wanted = theirs.index.search(vectors, 1)
    assert np.array_equal(wanted[:, 0], nearest_centroids(vectors, final_centroids(tmp_path / "work")))


def test_k_means_ends_when_nobody_moves(tmp_path):
    """Long before its iterations are over; and with copies of two documents for three clusters, one of which stays
    empty whatever is tried."""
    _, counts = find(tmp_path / "a", families(200), np.ones(200), clusters=4, iterations=1000)
    assert 1 < counts["iterations"] < 100
    copies = np.repeat(unit(np.eye(2, 24)), 20, axis=0)
    links, counts = find(tmp_path / "b", copies, np.ones(40), clusters=3, keep="first")
    assert links["row"].tolist() == [*range(1, 20), *range(21, 40)]
    assert set(links["kept"].tolist()) == {0, 20}
    assert counts["cluster_sizes"] == {"17-32": 2}


def test_a_threshold_is_met_to_the_last_bit():
    """Products that fp32 rounds over the threshold or under it are decided by fp64."""
    rng = np.random.default_rng(5)
    rows, columns = unit(rng.normal(size=(40, 64))), unit(rng.normal(size=(50, 64)))
    exact = np.einsum("id,jd->ij", rows.astype(np.float64), columns.astype(np.float64))
    for row, column in ((3, 7), (11, 0), (20, 49)):
        for threshold in (exact[row, column], np.nextafter(exact[row, column], 2)):
            near = exact >= threshold
            wanted = np.where(near.any(axis=1), near.argmax(axis=1), -1)
            assert np.array_equal(first_near(rows, columns, threshold, np.full(40, 50)), wanted)


def test_stripes_are_every_row_once():
    """Of each cluster with a pair in it, whatever the sizes; a large cluster is several tasks."""
    sizes = np.array([0, 1, 2, 300, 40, 16, 1, 17])
    tasks = list(stripes(sizes))
    assert len(tasks) > 10
    rows = [(cluster, row) for task in tasks for cluster, first, last in task for row in range(first, last)]
    assert rows == [(cluster, row) for cluster, size in enumerate(sizes) if size > 1 for row in range(size)]


def test_samples_are_spread_evenly():
    """Rising, none twice, one in each stretch; all rows where there are too few."""
    rows = sample_rows(10_007, 100, seed=1)
    borders = 10_007 * np.arange(101) // 100
    assert ((borders[:-1] <= rows) & (rows < borders[1:])).all()
    assert sample_rows(10, 100, seed=1).tolist() == list(range(10))


def test_chains_end_at_who_stays():
    """However long they are: 1000 documents, each near the one before."""
    rows = np.arange(1, 1000)
    assert set(follow(rows, rows - 1).tolist()) == {0}
    assert follow(np.zeros(0, np.int64), np.zeros(0, np.int64)).size == 0


LIMIT_MB = 180
"""140 for BLAS, whatever it multiplies, and 40 for a block's products and pairs, or a chunk."""

UNDER_LIMIT = """
import resource, sys
from pathlib import Path
import numpy as np
from megalite.corpus.semantic import kmeans
from megalite.corpus.semantic.nearest import first_near
from megalite.corpus.semantic.pairs import compare_stripes

kmeans.CHUNK_BYTES >>= 2  # of less data, as much of it
folder, rows, limit_mb = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
common = {"embeddings": str(folder / "embeddings.npy"), "lengths": str(folder / "lengths.npy"), "megabytes": 0.0}
common |= {"config": {"clusters": 1, "threshold": 0.5}, "iteration": 0}
some = np.load(folder / "embeddings.npy", mmap_mode="r")[:1100]
first_near(some[:64], some, 0.5, np.zeros(64, int))  # libraries and their buffers
used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (used + limit_mb * 10**6,) * 2)
kmeans.save_array(kmeans._centroids_file(folder, 0), np.asarray(some[:1]))
ranges = kmeans.chunks(rows, some.shape[1])
for number, chunk in enumerate(ranges):
    kmeans.assign_documents({**common, "rows": chunk}, number, folder)
print(compare_stripes({**common, "stripes": [[0, rows - 256, rows]]}, 0, folder)["comparisons"], len(ranges))
"""
"""The limit is on private memory: mapped files, which the system may drop at any time, do not count."""


def test_memory_is_that_of_blocks(tmp_path):
    """205 MB of vectors in one cluster, assigned and compared in 180 MB: half of them near each other, half near
    nobody, which are compared with all."""
    vectors = np.random.default_rng(0).standard_normal((400_000, 128), np.float32)
    vectors[::2, 0] += 20
    np.save(tmp_path / "embeddings.npy", unit(vectors))
    np.save(tmp_path / "lengths.npy", np.ones(len(vectors), np.int64))
    command = [sys.executable, "-c", UNDER_LIMIT, str(tmp_path), str(len(vectors)), str(LIMIT_MB)]
    root = Path(__file__).parents[3]
    outcome = subprocess.run(command, cwd=root, timeout=120, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr[-3000:]
    comparisons, num_chunks = map(int, outcome.stdout.split())
    assert 125 * len(vectors) < comparisons < 150 * len(vectors)
    assert num_chunks == 13
