"""Edges inside buckets, against comparing all pairs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.corpus.near import edges
from megalite.corpus.near.edges import MAX_REPRESENTATIVES, find_edges, pair_rule
from megalite.corpus.near.index import Index, save_array, shard_file, write_index_file
from megalite.corpus.near.settings import NearDedupConfig
from tests.corpus.near.truth import components, jaccard

SETS = NearDedupConfig(verify="jaccard", threshold=0.5)

EXACT_BUCKET = MAX_REPRESENTATIVES // 2 + 1
"""Documents up to which a bucket's clusters are those of all pairs."""


def write_index(folder: Path, buckets: list[list[int]], sets: list[set[int]], *, num_shards: int = 1) -> Path:
    """An index of made-up sets of shingles: documents `buckets[k]` have the band key k x 2^60."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = np.array_split(np.arange(len(sets)), num_shards)
    for number, documents in enumerate(shards):
        first = int(documents[0])
        inside = set(documents.tolist())
        entries = sorted((k, d - first) for k, bucket in enumerate(buckets) for d in bucket if d in inside)
        keys = np.array([k << 60 for k, _ in entries], np.uint64)
        ordered = [sorted(sets[d]) for d in documents.tolist()]
        arrays = {
            "band_keys": keys,
            "band_rows": np.array([row for _, row in entries], np.uint32),
            "sets": np.array([value for one in ordered for value in one], np.uint32),
            "set_borders": np.cumsum([0, *map(len, ordered)]),
            "lengths": np.array([len(one) for one in ordered]),
        }
        for name, array in arrays.items():
            save_array(shard_file(folder, number, name), array)
    write_index_file(folder, SETS, [documents.size for documents in shards])
    return folder


def all_edges(folder: Path, *, num_partitions: int = 1, num_old: int = 0) -> set[tuple[int, int]]:
    """Edges of all partitions."""
    index = Index([folder], SETS)
    found = [
        find_edges(index, p, num_partitions, rule=pair_rule(SETS), num_old=num_old).pairs for p in range(num_partitions)
    ]
    return {(int(a), int(b)) for a, b in np.concatenate(found)}


def true_pairs(buckets: list[list[int]], sets: list[set[int]]) -> set[tuple[int, int]]:
    """Pairs that meet in a bucket and are alike."""
    met = {(a, b) for bucket in buckets for a in bucket for b in bucket if a < b}
    return {(a, b) for a, b in met if jaccard(sets[a], sets[b]) >= SETS.threshold}


sets_and_buckets = st.lists(st.sets(st.integers(0, 9), min_size=1, max_size=6), min_size=2, max_size=14).flatmap(
    lambda sets: st.tuples(
        st.just(sets),
        st.lists(st.sets(st.integers(0, len(sets) - 1), min_size=1).map(sorted), min_size=1, max_size=6),
        st.integers(1, min(3, len(sets))),
        st.integers(1, 9),
    )
)


@given(sets_and_buckets)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_edges_connect_what_all_pairs_connect(tmp_path_factory, case):
    """Every edge is a pair that meets and is alike, and they connect the same clusters as all such pairs; in any
    number of partitions and shards."""
    sets, buckets, num_shards, num_partitions = case
    folder = write_index(tmp_path_factory.mktemp("index"), buckets, sets, num_shards=num_shards)
    found = all_edges(folder, num_partitions=num_partitions)
    truth = true_pairs(buckets, sets)
    assert found <= truth
    assert components(len(sets), found) == components(len(sets), truth)
    assert found == all_edges(folder)


def chained_sets(num_documents: int, *, seed: int) -> list[set[int]]:
    """Sets along winding chains, so that clusters are long and their ends unlike."""
    rng = np.random.default_rng(seed)
    place = rng.permutation(num_documents)
    return [set(range(3 * p - (p % 7), 3 * p + 7)) for p in place.tolist()]


def test_a_bucket_up_to_the_bound_is_exact(tmp_path):
    """In a bucket of 65 documents in chains, the clusters are those of all pairs."""
    sets = chained_sets(EXACT_BUCKET, seed=3)
    buckets = [list(range(EXACT_BUCKET))]
    truth = true_pairs(buckets, sets)
    sizes = np.bincount(components(len(sets), truth))
    assert sizes.max() > 3  # there are chains
    found = all_edges(write_index(tmp_path / "index", buckets, sets))
    assert components(len(sets), found) == components(len(sets), truth)


def test_comparing_with_the_first_alone_would_miss_pairs(tmp_path):
    """The second and third document of a bucket are found alike though neither is like the first."""
    sets = [{1, 2, 3}, {7, 8, 9}, {7, 8, 9, 10}]
    assert all_edges(write_index(tmp_path / "index", [[0, 1, 2]], sets)) == {(1, 2)}


@pytest.mark.parametrize("alike", [True, False])
def test_a_huge_bucket_costs_a_bounded_number_of_comparisons(tmp_path, alike):
    """Equal documents cost one comparison each, and unlike ones at most 128."""
    num_documents = 1000
    sets = [{1, 2, 3} if alike else {3 * d, 3 * d + 1, 3 * d + 2} for d in range(num_documents)]
    folder = write_index(tmp_path / "index", [list(range(num_documents))], sets)
    outcome = find_edges(Index([folder], SETS), 0, 1, rule=pair_rule(SETS))
    assert len(outcome.pairs) == (num_documents - 1 if alike else 0)
    assert outcome.num_comparisons <= num_documents * (1 if alike else MAX_REPRESENTATIVES)


def test_a_large_bucket_still_finds_copies_of_its_early_documents(tmp_path):
    """Beyond the bound a newcomer is compared with up to 128 different documents."""
    unlike = [{3 * d, 3 * d + 1, 3 * d + 2} for d in range(500)]
    sets = [*unlike, *unlike[:MAX_REPRESENTATIVES]]
    found = all_edges(write_index(tmp_path / "index", [list(range(len(sets)))], sets))
    assert found == {(d, 500 + d) for d in range(MAX_REPRESENTATIVES)}


@pytest.mark.parametrize("block_bytes", [1, 200, 1000])
def test_blocks_do_not_change_the_edges(tmp_path, monkeypatch, block_bytes):
    """However few documents are in memory at once, also where a bucket goes on in the next block."""
    rng = np.random.default_rng(4)
    sets = [set(rng.integers(0, 12, rng.integers(1, 8)).tolist()) for _ in range(150)]
    buckets = [list(range(0, 150, 2)), [5], list(range(100)), [9, 10], [149, 3, 77]]
    folder = write_index(tmp_path / "index", [sorted(bucket) for bucket in buckets], sets, num_shards=3)
    expected = all_edges(folder)
    monkeypatch.setattr(edges, "BLOCK_BYTES", block_bytes)
    assert all_edges(folder) == expected


def test_buckets_of_earlier_data_alone_are_passed_over(tmp_path):
    """Only a bucket that holds a new document is walked, with the older ones in it."""
    sets = [{1, 2, 3}] * 6
    folder = write_index(tmp_path / "index", [[0, 1], [2, 3, 4]], sets)
    assert all_edges(folder, num_old=4) == {(2, 3), (2, 4)}


@pytest.mark.parametrize(("other", "passes"), [({1, 2}, True), ({1, 2, 3, 4, 5, 6, 7, 8}, True), ({1, 9}, False)])
def test_exactly_the_threshold_passes(tmp_path, other, passes):
    """2 of 4 shingles shared are alike at .5, and so are 4 of 8; 1 of 5 is not."""
    found = all_edges(write_index(tmp_path / "index", [[0, 1]], [{1, 2, 3, 4}, other]))
    assert found == ({(0, 1)} if passes else set())
