"""Sets of intervals, against the same sets as whole numbers one by one."""

from __future__ import annotations

import numpy as np

from megalite.profile.intervals import NONE, both, contains, length, minus, union

NUM_CASES, LARGEST = 200, 40


def points(pieces: np.ndarray) -> set[int]:
    return {point for start, stop in pieces for point in range(int(start), int(stop))}


def random_pieces(rng: np.random.Generator) -> np.ndarray:
    """Overlapping, touching, empty and reversed ones among them."""
    return rng.integers(0, LARGEST, (rng.integers(0, 8), 2)).astype(float)


def test_they_are_the_sets_of_their_points():
    """Union, intersection and difference of random pieces hold exactly the points that Python's own sets hold, and
    come out ascending, apart from each other and not empty."""
    rng = np.random.default_rng(0)
    for _ in range(NUM_CASES):
        left, right = random_pieces(rng), random_pieces(rng)
        a, b = union(left), union(right)
        for found, wanted in (
            (a, points(left)),
            (both(a, b), points(left) & points(right)),
            (minus(a, b), points(left) - points(right)),
        ):
            assert points(found) == wanted
            assert length(found) == len(wanted)
            assert (found[:, 1] > found[:, 0]).all()
            assert (found[1:, 0] > found[:-1, 1]).all()
        where = np.arange(-1, LARGEST + 1)
        assert [point for point in where if contains(a, where.astype(float))[point + 1]] == sorted(points(left))


def test_nothing_has_no_length():
    assert length(union([])) == length(both(NONE, union([(0, 1)]))) == length(minus(NONE, NONE)) == 0.0
