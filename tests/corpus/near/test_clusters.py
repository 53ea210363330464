"""Clusters and who stays, against sets and sorting."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.corpus.near import clusters
from megalite.corpus.near.clusters import choose_winners, connect, documents_with_edges
from megalite.corpus.near.report import choose_examples, size_histogram
from tests.corpus.near.truth import components

NUM_DOCUMENTS = 30

RANDOM = settings(max_examples=150, deadline=None, derandomize=True)

edge_lists = st.lists(
    st.tuples(st.integers(0, NUM_DOCUMENTS - 1), st.integers(0, NUM_DOCUMENTS - 1)).filter(
        lambda pair: pair[0] != pair[1]
    ),
    max_size=40,
)


def arrays_of(edges: list[tuple[int, int]], num_files: int) -> list[np.ndarray]:
    """The edges in some files, with numbers beyond 32 bits."""
    pairs = np.array(edges, np.int64).reshape(-1, 2) + 2**40
    return np.array_split(pairs, num_files)


@RANDOM
@given(edge_lists, st.integers(1, 4))
def test_clusters_are_the_connected_components(edges, num_files):
    """Every document with an edge has the smallest one it is connected to as its root, in any order of the edges."""
    files = arrays_of(edges, num_files)
    documents = documents_with_edges(files)
    assert documents.tolist() == sorted({d + 2**40 for edge in edges for d in edge})
    roots = connect(documents, files)
    truth = components(NUM_DOCUMENTS, edges)
    assert (documents[roots] - 2**40).tolist() == [truth[d - 2**40] for d in documents.tolist()]
    np.testing.assert_array_equal(connect(documents, files[::-1]), roots)


@RANDOM
@given(
    edge_lists,
    st.lists(st.sampled_from([1.0, 2.0, 3.0, np.nan, np.inf, -np.inf]), min_size=NUM_DOCUMENTS, max_size=NUM_DOCUMENTS),
    st.integers(0, NUM_DOCUMENTS),
)
def test_who_stays(edges, scores, num_old):
    """The first of the earlier data if there is one, else the first of those with the highest score."""
    files = arrays_of(edges, 1)
    documents = documents_with_edges(files)
    old = int(np.searchsorted(documents, num_old + 2**40))
    winners = choose_winners(connect(documents, files), np.array(scores)[documents - 2**40], old)
    truth = components(NUM_DOCUMENTS, edges)
    for place, document in enumerate((documents - 2**40).tolist()):
        members = [d for d in range(NUM_DOCUMENTS) if truth[d] == truth[document]]

        def rank(d: int) -> tuple[bool, float, int]:
            return d >= num_old, -np.inf if d < num_old else np.inf if np.isnan(scores[d]) else -scores[d], d

        assert documents[winners[place]] - 2**40 == min(members, key=rank)


def test_many_edges_are_read_in_chunks(monkeypatch):
    """A file longer than a chunk, and more documents than wait to be merged, change nothing."""
    rng = np.random.default_rng(0)
    edges = [tuple(pair) for pair in rng.integers(0, NUM_DOCUMENTS, (200, 2)).tolist() if pair[0] < pair[1]][:25]
    files = arrays_of(edges, 3)
    documents = documents_with_edges(files)
    roots = connect(documents, files)
    monkeypatch.setattr(clusters, "CHUNK", 2)
    np.testing.assert_array_equal(documents_with_edges(files), documents)
    np.testing.assert_array_equal(connect(documents, files), roots)


def test_size_histogram():
    """Classes double; empty ones are left out."""
    assert size_histogram(np.array([2, 2, 3, 4, 5, 8, 9, 1000])) == {
        "2": 2,
        "3-4": 2,
        "5-8": 2,
        "9-16": 1,
        "513-1024": 1,
    }
    assert size_histogram(np.array([], np.int64)) == {}


def test_examples_range_from_the_largest_to_the_smallest():
    """Up to five clusters, of each the first documents; of earlier data only the very first."""
    roots = np.array([0] * 20 + [20] * 3 + [23] * 2 + [25] * 10)
    sizes = np.bincount(roots)
    assert choose_examples(roots, sizes, 0) == [
        [0, 1, 2, 3, 4, 5, 6, 7],
        [25, 26, 27, 28, 29, 30, 31, 32],
        [20, 21, 22],
        [23, 24],
    ]
    assert choose_examples(roots, sizes, 15)[0] == [0, 15, 16, 17, 18, 19]
    many = np.repeat(np.arange(0, 40, 2), 2)
    assert choose_examples(many, np.bincount(many), 0) == [[0, 1], [8, 9], [18, 19], [28, 29], [38, 39]]
    assert choose_examples(np.zeros(0, np.int64), np.zeros(0, np.int64), 0) == []
