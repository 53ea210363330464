"""The mixture: exact shares, and every sample of every source once an epoch."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.data.mix import BLOCK, InTurn, Mixture, ShuffledMixture, round_to_quotas

WEIGHTS = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=6)


@given(weights=WEIGHTS)
@settings(max_examples=100, deadline=None)
def test_quotas_are_nearest_integers(weights):
    """They sum to the block, nobody gets nothing, and none is off by a whole sample unless it was raised to one."""
    quotas = round_to_quotas(weights, BLOCK)
    shares = np.array(weights) / np.sum(weights) * BLOCK
    assert quotas.sum() == BLOCK
    assert quotas.min() >= 1
    if shares.min() >= 1:
        assert np.abs(quotas - shares).max() < 1


@given(weights=WEIGHTS)
@settings(max_examples=15, deadline=None)
def test_draws_count_up_within_each_source(weights):
    """Over two blocks, the n-th draw of a source is numbered n, and each block holds exactly its quotas."""
    mixture = Mixture(weights)
    sources, numbers = mixture.draw(np.arange(2 * BLOCK))
    for source, quota in enumerate(mixture.quotas):
        assert (numbers[sources == source] == np.arange(2 * quota)).all()
        assert (sources[:BLOCK] == source).sum() == quota


@given(weights=st.lists(st.floats(0.05, 1.0), min_size=2, max_size=5), length=st.integers(1, BLOCK))
@settings(max_examples=30, deadline=None)
def test_any_prefix_keeps_the_shares(weights, length):
    """A short run sees its sources in the right shares too, within about a sample each."""
    sources, _ = Mixture(weights).draw(np.arange(length))
    counts = np.bincount(sources, minlength=len(weights))
    assert np.abs(counts - np.array(weights) / np.sum(weights) * length).max() < len(weights)


def test_scalar_draws_equal_array_draws():
    """Also across the border of a block and far out."""
    mixture = Mixture([0.7, 0.2, 0.1])
    indices = np.array([0, 1, BLOCK - 1, BLOCK, 10**12 + 7])
    sources, numbers = mixture.draw(indices)
    assert [mixture.draw(index) for index in indices.tolist()] == list(zip(sources, numbers, strict=True))


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=4), seed=st.integers(0, 5), data=st.data())
@settings(max_examples=30, deadline=None)
def test_each_epoch_of_a_source_holds_each_sample_once(sizes, seed, data):
    """Brute force over 2,000 samples: complete epochs are permutations, the running one has no repetition."""
    weights = data.draw(st.lists(st.floats(0.1, 1.0), min_size=len(sizes), max_size=len(sizes)))
    names = [f"source {number}" for number in range(len(sizes))]
    order = ShuffledMixture(sizes=sizes, weights=weights, names=names, seed=seed)
    located = [order.locate(index) for index in range(2000)]
    assert order.locate_range(0, 2000).tolist() == [list(place) for place in located]
    seen = Counter(located)
    assert max(seen.values()) == 1
    for source, size in enumerate(sizes):
        epochs = [epoch for at, epoch, _ in located if at == source]
        assert epochs == sorted(epochs)
        for epoch in range(max(epochs)):
            assert sorted(p for s, e, p in located if (s, e) == (source, epoch)) == list(range(size))


def test_epochs_and_seeds_shuffle_differently():
    """The same samples come in another order in the next epoch and under another seed."""
    order, other = (ShuffledMixture(sizes=[100], weights=[1], names=["a"], seed=seed) for seed in (1, 2))
    first, second = order.locate_range(0, 200)[:, 2].reshape(2, 100)
    assert (first == second).mean() < 0.1
    assert (first == other.locate_range(0, 100)[:, 2]).mean() < 0.1


def test_adding_a_source_leaves_the_orders_of_others():
    """Shuffles are keyed by name, so a mixture can grow without reshuffling what it has."""
    alone = ShuffledMixture(sizes=[50], weights=[1], names=["b"], seed=1).locate_range(0, 50)[:, 2]
    both = ShuffledMixture(sizes=[30, 50], weights=[1, 1], names=["a", "b"], seed=1).locate_range(0, 100)
    assert (both[both[:, 0] == 1, 2] == alone).all()


@pytest.mark.parametrize("start", [0, 3, 9])
def test_in_turn_reads_sources_from_start_to_end(start):
    """Validation order, brute force, over the end of an epoch."""
    expected = [[s, e, p] for e in range(3) for s, size in enumerate([4, 1, 2]) for p in range(size)]
    order = InTurn(sizes=[4, 1, 2])
    assert order.locate_range(start, 21).tolist() == expected[start:]
    assert [list(order.locate(index)) for index in range(start, 21)] == expected[start:]
