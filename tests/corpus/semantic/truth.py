"""Plain ways to say who goes, and vectors among which some are near."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megalite.corpus.semantic.kmeans import learn_clusters
from megalite.corpus.semantic.pairs import find_semantic_duplicates, links_file
from megalite.corpus.semantic.settings import SemanticDedupConfig
from megalite.progress import NoProgress
from megalite.stations.runners import InProcess


def unit(vectors: np.ndarray) -> np.ndarray:
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def families(num_documents: int, width: int = 24, seed: int = 0) -> np.ndarray:
    """Vectors of length 1 around some centres, of which a third are near an earlier one, and some are equal."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(6, width))
    vectors = centres[rng.integers(0, 6, num_documents)] + 0.6 * rng.normal(size=(num_documents, width))
    for row in range(1, num_documents):
        kind, other = rng.random(), rng.integers(0, row)
        if kind < 0.33:
            vectors[row] = vectors[other] + rng.choice([0.0, 0.02, 0.12, 0.2]) * rng.normal(size=width)
    return unit(vectors)


def published(vectors: np.ndarray, order: np.ndarray, threshold: float) -> set[int]:
    """Who goes of one cluster, by the code in the paper's appendix: the largest similarity to any before.

    Args:
        vectors: [all documents, n].
        order: rows of the cluster, those that are to stay first.
        threshold: 1 - epsilon.
    """
    ours = vectors[order].astype(np.float64)
    products = np.triu(ours @ ours.T, k=1)
    products[np.tril_indices(len(ours))] = -np.inf
    return {int(row) for row, most in zip(order, products.max(axis=0), strict=True) if most >= threshold}


def find(folder: Path, vectors: np.ndarray, lengths: np.ndarray, **settings) -> tuple[np.ndarray, dict]:
    """The links that the tasks find, and their counts."""
    folder.mkdir(parents=True)
    np.save(folder / "embeddings.npy", vectors)
    np.save(folder / "lengths.npy", lengths)
    config = SemanticDedupConfig(**settings)
    where = {"runner": InProcess(), "progress": NoProgress(), "text_mb": 1.0}
    learnt = learn_clusters(folder, folder / "embeddings.npy", config, **where)
    counts = find_semantic_duplicates(folder, folder / "embeddings.npy", folder / "lengths.npy", config, **where)
    return np.load(links_file(folder)), {**counts, **learnt}
