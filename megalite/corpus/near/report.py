"""What near-duplicate removal found: counts, the sizes of the clusters, and some of them by name to look at."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

NUM_EXAMPLES = 5
"""Clusters that are named: from the largest to the smallest, evenly spaced in that order."""

MAX_NAMED = 8
"""Documents of a cluster that are named."""


@dataclass(frozen=True)
class NearReport:
    """The outcome, ready for JSON. Documents of earlier data count in the sizes of clusters and nowhere else."""

    documents: int
    kept: int
    text_bytes: int
    kept_bytes: int
    without_words: int
    """Documents of blanks and signs alone: they have no shingle, and are kept."""
    clusters: int
    largest_cluster: int
    cluster_sizes: dict[str, int]
    """Clusters by size: 2, 3-4, 5-8 and so on."""
    removed_by_source: dict[str, int]
    examples: list[list[str]]
    """Documents of some clusters: ids, and `earlier data` for those of the index."""
    comparisons: int
    """Pairs that met and were checked."""

    @property
    def removed(self) -> int:
        """Documents that do not stay."""
        return self.documents - self.kept


def size_histogram(sizes: np.ndarray) -> dict[str, int]:
    """Clusters counted by size, in classes that double.

    Args:
        sizes: int64 [clusters], each at least 2.
    """
    classes = np.ceil(np.log2(sizes)).astype(np.int64)
    counts = np.bincount(classes)
    names = ["1", "2", *(f"{2 ** (c - 1) + 1}-{2**c}" for c in range(2, counts.size))]
    return {name: int(count) for name, count in zip(names, counts, strict=False) if count}


def choose_examples(roots: np.ndarray, sizes: np.ndarray, num_old: int) -> list[list[int]]:
    """Places of some documents of some clusters: the first one, and the first new ones.

    Args:
        roots: int64 [documents]: the cluster of each, as the place of its first document.
        sizes: int64 [documents]: documents of the cluster at its root's place, 0 elsewhere.
        num_old: the first so many documents are earlier data.
    """
    clusters = np.flatnonzero(sizes)
    largest_first = clusters[np.argsort(-sizes[clusters], kind="stable")]
    chosen = np.unique(np.linspace(0, largest_first.size - 1, min(NUM_EXAMPLES, largest_first.size)).astype(np.int64))
    examples = []
    for root in largest_first[chosen]:
        new = np.flatnonzero(roots[num_old:] == root) + num_old
        examples.append(np.union1d([root], new)[:MAX_NAMED].tolist())
    return examples
