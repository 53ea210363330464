"""The mixture: exact shares, and every sample of every source once an epoch."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.data.mix import (
    BLOCK,
    CYCLE,
    ROUNDED_BY,
    InTurn,
    MixStage,
    Mixture,
    ShuffledMixture,
    StagedMixture,
    round_to_quotas,
)
from tests.data.golden import hash_of

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


def two_blocks(mixture: Mixture) -> np.ndarray:
    """Quotas of the first two, int64 [2, sources]."""
    return np.stack([mixture.quotas[0], mixture.quotas[1 % len(mixture.quotas)]])


@given(weights=WEIGHTS)
@settings(max_examples=15, deadline=None)
def test_small_shares_are_met_over_many_blocks(weights):
    """To a thousandth, or half a sample in a cycle, in every cycle; at any point within a sample but for the largest;
    and a sample far into the run is found as one of the first."""
    mixture, shares = Mixture(weights), np.array(weights) / np.sum(weights)
    cycle = len(mixture.quotas) * BLOCK
    of_cycle = mixture.count(cycle)
    off = np.abs(of_cycle - shares * cycle)
    assert (off <= np.maximum(ROUNDED_BY * shares * cycle, 1.0)).all() or of_cycle.min() == 1
    assert (mixture.quotas.sum(axis=1) == BLOCK).all()
    assert mixture.quotas.min() >= 0
    for blocks in (1, 7, 500):
        given = mixture.count(blocks * BLOCK)
        late = np.abs(given - of_cycle / len(mixture.quotas) * blocks)
        assert (np.delete(late, np.argmax(shares)) < 1).all() or len(mixture.quotas) == 1
    for index in (0, BLOCK - 1, BLOCK, 12_345_678, 3 * cycle + 5):
        source, number = mixture.draw(index)
        assert mixture.count(index)[source] == number
        assert [each.tolist() for each in mixture.draw(np.array([index]))] == [[source], [number]]


@pytest.mark.parametrize(("total", "size"), [(1_831_054_688, 2441), (100_000_000, 1500), (10_000_000, 120)])
def test_epochs_of_a_small_source_in_a_long_run(total: int, size: int):
    """One pass is one, to a hundredth, where a block of 100,000 samples gave 0.7 to 7."""
    mixture = Mixture([total - size, size])
    assert mixture.count(total)[1] == pytest.approx(size, rel=0.01)


@given(weights=WEIGHTS)
@settings(max_examples=15, deadline=None)
def test_draws_count_up_within_each_source(weights):
    """Over two blocks, the n-th draw of a source is numbered n, and each block holds exactly its quotas."""
    mixture = Mixture(weights)
    sources, numbers = mixture.draw(np.arange(2 * BLOCK))
    for source, (first, second) in enumerate(two_blocks(mixture).T.tolist()):
        assert (numbers[sources == source] == np.arange(first + second)).all()
        assert (sources[:BLOCK] == source).sum() == first


@given(weights=st.lists(st.floats(0.05, 1.0), min_size=2, max_size=5), length=st.integers(1, BLOCK))
@settings(max_examples=30, deadline=None)
def test_any_prefix_keeps_the_shares(weights, length):
    """A short run sees its sources in the right shares too, within about a sample each."""
    sources, _ = Mixture(weights).draw(np.arange(length))
    counts = np.bincount(sources, minlength=len(weights))
    assert np.abs(counts - np.array(weights) / np.sum(weights) * length).max() < len(weights)


@given(weights=st.lists(st.floats(0, 1), min_size=1, max_size=8).filter(any))
@settings(max_examples=15, deadline=None)
def test_exact_turns_are_never_a_sample_early_or_late(weights):
    """At every point of a block, each source has given less than one sample more or less than its share."""
    mixture = Mixture(weights, "exact")
    sources, numbers = mixture.draw(np.arange(2 * BLOCK))
    assert len(mixture.quotas) == CYCLE or (sources[:BLOCK] == sources[BLOCK:]).all()
    for source, (quota, second) in enumerate(two_blocks(mixture).T.tolist()):
        own = sources[:BLOCK] == source
        assert own.sum() == quota
        assert (numbers[sources == source] == np.arange(quota + second)).all()
        late = np.cumsum(own) * BLOCK - quota * np.arange(1, BLOCK + 1)
        assert np.abs(late).max() < BLOCK


def test_a_heavy_source_beside_many_light_ones():
    """Where turns of equal sources coincide, `spread` is some samples late; `exact` is what stages use instead."""
    weights = [0.5] + [0.01] * 50
    for pattern, least, most in (("spread", 10, 13), ("exact", 0, 1)):
        sources, _ = Mixture(weights, pattern).draw(np.arange(1000))
        late = np.abs(np.cumsum(sources == 0) - 0.5 * np.arange(1, 1001)).max()
        assert least <= late < most


STAGES = st.lists(
    st.tuples(st.integers(1, 3000), st.lists(st.floats(0, 1), min_size=3, max_size=3).filter(any)),
    min_size=1,
    max_size=4,
)


@given(stages=STAGES)
@settings(max_examples=12, deadline=None)
def test_stages_follow_each_other_exactly(stages):
    """Drawn one by one: each stage holds its own sources in their shares, and a source's numbers run on through all."""
    stops = np.cumsum([length for length, _ in stages])
    plan = [MixStage(int(stop), tuple(weights)) for stop, (_, weights) in zip(stops, stages, strict=True)]
    plan[-1] = plan[-1]._replace(stop=None)
    mixture = StagedMixture(plan)
    total = int(stops[-1])
    sources, numbers = mixture.draw(np.arange(total))
    for source in range(3):
        assert numbers[sources == source].tolist() == list(range((sources == source).sum()))
    begin = 0
    for stop, stage in zip(stops.tolist(), plan, strict=True):
        share = round_to_quotas(stage.weights, BLOCK) / BLOCK
        counts = np.bincount(sources[begin:stop], minlength=3)
        assert np.abs(counts - share * (stop - begin)).max() < 1
        assert mixture.count(stop).tolist() == np.bincount(sources[:stop], minlength=3).tolist()
        begin = stop
    assert [mixture.draw(index) for index in range(0, total, 97)] == [
        (sources[index], numbers[index]) for index in range(0, total, 97)
    ]


def test_one_stage_equals_its_mixture():
    """A stage adds nothing of its own."""
    indices = np.arange(3000)
    alone = Mixture((0.2, 0.5), "exact").draw(indices)
    staged = StagedMixture([MixStage(None, (0.2, 0.5))]).draw(indices)
    assert all((one == other).all() for one, other in zip(alone, staged, strict=True))


def test_a_trillion_samples_need_no_memory():
    """Random access at 10^12, across a border of stages there, in a few kilobytes, and counted right up to it."""
    border = 10**12 + 12_345
    stages = [MixStage(border, (0.6, 0.4, 0)), MixStage(None, (0, 0.5, 0.5))]
    order = ShuffledMixture(sizes=[10**9, 3 * 10**8, 10**8], weights=[], names="abc", seed=1, stages=stages)
    indices = np.arange(border - 500, border + 500)
    order.locate_many(indices)
    tracemalloc.start()
    located = order.locate_many(indices)
    one_by_one = [order.locate(index) for index in indices.tolist()]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000
    assert located.tolist() == [list(place) for place in one_by_one]
    assert set(located[:500, 0].tolist()) == {0, 1}
    assert set(located[500:, 0].tolist()) == {1, 2}
    before = order.mixture.count(border)
    assert before.sum() == border
    assert np.abs(before - np.array([0.6, 0.4, 0]) * border).max() < 1
    sources, numbers = order.mixture.draw(indices)
    assert numbers[500:][sources[500:] == 1][0] == before[1]
    assert numbers[500:][sources[500:] == 2][0] == 0
    assert np.unique(located, axis=0).shape == located.shape


def test_epochs_run_on_through_stages():
    """A source read half in one stage is read on in the next: nothing twice before everything once."""
    stages = [MixStage(40, (1, 1)), MixStage(50, (0, 1)), MixStage(None, (1, 0))]
    order = ShuffledMixture(sizes=[30, 30], weights=[], names=["a", "b"], seed=4, stages=stages)
    located = order.locate_range(0, 60)
    for source in (0, 1):
        own = located[located[:, 0] == source]
        assert own[:, 1].tolist() == [0] * 30
        assert sorted(own[:, 2].tolist()) == list(range(30))


@pytest.mark.parametrize(
    ("seed", "expected"), [(0, "beaedc5f5962ba3d"), (1, "b1b5a21f756d9546"), (77, "4fb28491f8879942")]
)
def test_golden_order_without_stages(seed, expected):
    """The order of runs from before there were stages, at the start and at 10^12."""
    order = ShuffledMixture(sizes=[1000, 33, 250_000], weights=[0.5, 0.01, 3], names=["a", "b", "c"], seed=seed)
    assert hash_of(order.locate_range(0, 5000), order.locate_range(10**12 - 7, 10**12 + 200_000)) == expected


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
