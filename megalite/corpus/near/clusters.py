"""Clusters from edges, and who stays of each.

Only documents with an edge are held, at 56 bytes each while they are collected and sorted, and less afterwards: 8 for
the number, 8 for the parent in the forest, 16 for the score and the winner. All the others cost nothing. The root of a
tree is always its smallest number, so the outcome does not depend on the order of the edges.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from megalite.kernel import kernel

CHUNK = 1 << 20
"""Edges read at once."""


def documents_with_edges(edges: Iterable[np.ndarray]) -> np.ndarray:
    """Sorted numbers of the documents in some edges, int64.

    Args:
        edges: int64 [edges, 2] each, mapped or in memory.
    """
    known = np.zeros(0, np.int64)
    waiting: list[np.ndarray] = []
    num_waiting = 0
    for chunk in _chunks(edges):
        waiting.append(np.unique(chunk))
        num_waiting += waiting[-1].size
        if num_waiting > max(known.size, CHUNK):  # merging when as much has come as is known costs n log n in all
            known, num_waiting = np.unique(np.concatenate([known, *waiting])), 0
            waiting.clear()
    return np.unique(np.concatenate([known, *waiting]))


def connect(documents: np.ndarray, edges: Iterable[np.ndarray]) -> np.ndarray:
    """The cluster of each document, as the place of its first one, int64 [documents].

    Args:
        documents: sorted numbers, as of `documents_with_edges`.
        edges: the same edges again.
    """
    parents = np.arange(documents.size)
    for chunk in _chunks(edges):
        _unite(parents, np.searchsorted(documents, chunk))
    _flatten(parents)
    return parents


def choose_winners(roots: np.ndarray, scores: np.ndarray, num_old: int) -> np.ndarray:
    """The place of the document that stays of each one's cluster, int64 [documents].

    Args:
        roots: the cluster of each, as of `connect`.
        scores: float64 [documents]; the highest stays, the earlier of equals; NaN is lower than all numbers.
        num_old: the first so many are earlier data: where a cluster has one, its first one stays whatever the scores.
    """
    scores = np.where(np.isnan(scores), -np.inf, scores)
    scores[:num_old] = np.inf
    return _winners(roots, scores)


def _chunks(edges: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    for pairs in edges:
        for begin in range(0, len(pairs), CHUNK):
            yield np.asarray(pairs[begin : begin + CHUNK])


@kernel
def _find(parents: np.ndarray, place: int) -> int:
    """The root, with each step's path halved."""
    while parents[place] != place:
        parents[place] = parents[parents[place]]
        place = parents[place]
    return place


@kernel
def _unite(parents: np.ndarray, pairs: np.ndarray) -> None:
    for pair in pairs:
        first, second = _find(parents, pair[0]), _find(parents, pair[1])
        if first < second:
            parents[second] = first
        else:
            parents[first] = second


@kernel
def _flatten(parents: np.ndarray) -> None:
    """Parents come before their children, so one pass brings all to the roots."""
    for place in range(parents.size):
        parents[place] = parents[parents[place]]


@kernel
def _winners(roots: np.ndarray, scores: np.ndarray) -> np.ndarray:
    best = np.arange(roots.size)
    for place in range(roots.size):
        if scores[place] > scores[best[roots[place]]]:
            best[roots[place]] = place
    return best[roots]
