"""The keyed permutation: a bijection for every size, and a shuffle as far as statistics can tell."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.data.order import KeyedPermutation, permute_each
from tests.data.golden import hash_of

SIZES = st.one_of(st.integers(1, 3000), st.sampled_from([2**k + d for k in range(2, 12) for d in (-1, 0, 1)]))

CHI_SQUARE_LIMIT = 60.0
"""22 degrees of freedom: chance exceeds this once in 50,000; the keys are fixed, so the test never flickers."""


@given(size=SIZES, key=st.text(max_size=5))
@settings(max_examples=100, deadline=None)
def test_every_element_is_met_once(size, key):
    """A bijection of [0, size), for sizes at and around powers of two as well."""
    values = KeyedPermutation(size, key).many(np.arange(size))
    assert sorted(values.tolist()) == list(range(size))


@given(size=st.integers(1, 2**62), key=st.text(max_size=5), data=st.data())
@settings(max_examples=100, deadline=None)
def test_one_by_one_equals_many(size, key, data):
    """Python ints and uint64 arrays go through the same arithmetic, also where it wraps."""
    indices = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20))
    permutation = KeyedPermutation(size, key)
    assert [permutation(index) for index in indices] == permutation.many(np.array(indices)).tolist()


@pytest.mark.parametrize("size", [10**12, 10**12 + 39, 2**62])
def test_huge_sizes_stay_in_range_without_collisions(size):
    """10^12 samples need no memory: a window of them lands on distinct places all over the range."""
    values = KeyedPermutation(size, "seed").many(np.arange(size - 200_000, size))
    assert 0 <= values.min() <= values.max() < size
    assert np.unique(values).size == values.size
    tenths = np.bincount(values * 10 // size if size < 2**59 else values // (size // 10 + 1), minlength=10)
    assert tenths.min() > 19_000


def test_first_place_is_uniform_over_keys():
    """Over many keys, element 0 goes everywhere equally often."""
    size, num_keys = 23, 4600
    counts = np.bincount([KeyedPermutation(size, f"key {number}")(0) for number in range(num_keys)], minlength=size)
    expected = num_keys / size
    assert ((counts - expected) ** 2 / expected).sum() < CHI_SQUARE_LIMIT


def test_neighbours_land_far_apart():
    """No trace of the old order: places of neighbours are uncorrelated, and differences do not repeat."""
    values = KeyedPermutation(10_000, "seed").many(np.arange(10_000))
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.05
    assert np.unique(np.diff(values)).size > 5_000


def test_keys_decide():
    """The same key gives the same order, another key another one."""
    first, again, other = (KeyedPermutation(1000, key).many(np.arange(1000)) for key in ("a", "a", "b"))
    assert (first == again).all()
    assert (first == other).mean() < 0.02


@given(sizes=st.lists(st.integers(1, 2**62), min_size=1, max_size=8), data=st.data())
@settings(max_examples=100, deadline=None)
def test_many_permutations_at_once(sizes, data):
    """Each index in its own permutation, sizes from 1 to 2^62 mixed, against one by one."""
    permutations = [KeyedPermutation(size, f"{number}") for number, size in enumerate(sizes)]
    which = data.draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=40))
    indices = [data.draw(st.integers(0, sizes[number] - 1)) for number in which]
    found = permute_each(permutations, np.array(which), np.array(indices))
    assert found.dtype == np.int64
    assert found.tolist() == [permutations[number](index) for number, index in zip(which, indices, strict=True)]


def test_golden_order():
    """The orders of runs that exist. They must never change, or no run could go on."""
    found = {}
    for size, key in ((1, "a"), (1000, "7/books/3"), (4097, "x"), (10**12, "1/web/0")):
        values = KeyedPermutation(size, key).many(np.arange(0, size, max(1, size // 1000)))
        found[size, key] = hash_of(values)
    assert found == {
        (1, "a"): "ba553f9413e2fef9",
        (1000, "7/books/3"): "3bd7b1c7e57352d8",
        (4097, "x"): "0841a6aaccc9fd14",
        (10**12, "1/web/0"): "e8981e787bfb8f00",
    }
