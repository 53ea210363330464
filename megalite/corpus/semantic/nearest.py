"""Inner products of many vectors with many, by faiss: which centroid is nearest, which vectors are near each other.

faiss computes in blocks with BLAS, whose last bits depend on the blocks. So no pair is decided by them: what lies
within SLACK of the threshold is computed again, number by number in fp64, and that depends on the two vectors alone.
Calls use one thread, so that the nearest of centroids that are about as near is the same one: tasks are what runs in
parallel.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megalite.errors import UnavailableError

NEEDS = "pip install 'megalite[semantic]'"

SLACK = 1e-4
"""More than a product of two vectors of length 1 is wrong by in fp32: some sqrt(n) 2^-24 for n numbers."""

PAIRS_AT_ONCE = 1 << 12
"""Whose vectors are in memory while they are computed again."""


def require_faiss() -> None:
    """Raises UnavailableError: faiss is not installed."""
    _faiss()


def nearest_centroids(vectors: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """The place of the centroid with the largest inner product of each vector, int32 [vectors].

    Args:
        vectors: [vectors, n], fp32 or fp16.
        centroids: float32 [centroids, n].
    """
    index = _faiss().IndexFlatIP(centroids.shape[1])
    index.add(np.ascontiguousarray(centroids, np.float32))
    _, places = index.search(np.ascontiguousarray(vectors, np.float32), 1)
    return places[:, 0].astype(np.int32)


def similarities(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The inner product of each row of one with the same row of the other, float64 [rows]."""
    products = np.empty(len(first))
    for begin in range(0, len(first), PAIRS_AT_ONCE):
        some = slice(begin, begin + PAIRS_AT_ONCE)
        products[some] = np.einsum("ij,ij->i", first[some].astype(np.float64), second[some].astype(np.float64))
    return products


def first_near(rows: np.ndarray, columns: np.ndarray, threshold: float, before: np.ndarray) -> np.ndarray:
    """For each row the place of the first column that is near it, int64 [rows]; -1 where none is.

    Args:
        rows: [rows, n].
        columns: [columns, n].
        threshold: inner product from which on two are near.
        before: int64 [rows]: how many columns, from the first on, a row may be near to.
    """
    index = _faiss().IndexFlatIP(columns.shape[1])
    index.add(np.ascontiguousarray(columns, np.float32))
    limits, products, places = index.range_search(np.ascontiguousarray(rows, np.float32), threshold - SLACK)
    owners = np.repeat(np.arange(len(rows)), np.diff(limits.astype(np.int64)))
    allowed = places < before[owners]
    owners, places, products = owners[allowed], places[allowed], products[allowed]
    is_near = products >= threshold + SLACK
    doubtful = np.flatnonzero(~is_near)
    for begin in range(0, doubtful.size, PAIRS_AT_ONCE):  # which may be all
        some = doubtful[begin : begin + PAIRS_AT_ONCE]
        is_near[some] = similarities(rows[owners[some]], columns[places[some]]) >= threshold
    found = np.full(len(rows), len(columns), np.int64)
    np.minimum.at(found, owners[is_near], places[is_near])
    return np.where(found < len(columns), found, -1)


def _faiss() -> Any:
    """The library, told to compute with one thread."""
    try:
        import faiss
    except ImportError as error:
        raise UnavailableError(f"semantic_dedup needs faiss: {NEEDS}") from error
    faiss.omp_set_num_threads(1)
    return faiss
