"""The S-curve of banded MinHash: how likely two documents are to meet, by how similar they are.

A signature is cut into bands of `rows` values. Two documents of Jaccard similarity s agree in one value with
probability s, in a whole band with s^rows, and they meet when at least one band agrees:

    P(meet | s) = 1 - (1 - s^rows)^bands                              (Leskovec et al., Mining of Massive Datasets, 3.4)

More rows make the curve steeper and move it right, more bands move it left. Where the pairs that meet are then checked
by their signatures, the curve of what is removed is steeper still; `removal_probability` computes it exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

BAR_WIDTH = 40
"""Characters of a bar that stands for probability 1."""


def collision_probability(similarity: float, bands: int, rows: int) -> float:
    """How likely two documents of this Jaccard similarity are to agree in a whole band."""
    return 1.0 - (1.0 - similarity**rows) ** bands


def s_curve(bands: int, rows: int, num_points: int = 21) -> list[tuple[float, float]]:
    """The curve at evenly spaced similarities from 0 to 1: pairs (similarity, probability of meeting)."""
    similarities = [point / (num_points - 1) for point in range(num_points)]
    return [(similarity, collision_probability(similarity, bands, rows)) for similarity in similarities]


def agreements_needed(threshold: float, num_hashes: int) -> int:
    """Least number of equal values for an estimate of at least the threshold."""
    return math.ceil(threshold * num_hashes - 1e-9)


def removal_probability(similarity: float, bands: int, rows: int, *, num_hashes: int, threshold: float) -> float:
    """How likely a pair is to meet in a band and also to agree in `threshold` of all values.

    Both look at the same values, so they are counted together: of all ways to agree often enough, those are taken away
    in which no band is whole. The number of agreements in a band that is not whole is binomial without its last term;
    over the bands, and the values that no band uses, the counts are convolved.
    """
    needed = agreements_needed(threshold, num_hashes)
    band = _binomial(rows, similarity)
    broken = band.copy()
    broken[rows] = 0.0
    some_way = none_whole = _binomial(num_hashes - bands * rows, similarity)
    for _ in range(bands):
        some_way = np.convolve(some_way, band)
        none_whole = np.convolve(none_whole, broken)
    return float(np.clip(some_way[needed:].sum() - none_whole[needed:].sum(), 0.0, 1.0))


def draw_s_curve(bands: int, rows: int, removal: Callable[[float], float], num_points: int = 21) -> str:
    """A table of the curve with bars, for a terminal: `#` is removed, `.` only meets.

    Args:
        bands: bands of a signature.
        rows: values in a band.
        removal: how likely a pair of a similarity is to meet and to pass the check.
        num_points: lines of the table.
    """
    lines = [f"{bands} bands of {rows} rows", "Jaccard   meet  removed"]
    for similarity, meet in s_curve(bands, rows, num_points):
        removed = removal(similarity)
        bar = "#" * round(removed * BAR_WIDTH)
        bar += "." * (round(meet * BAR_WIDTH) - len(bar))
        lines.append(f"{similarity:7.2f}  {meet:5.3f}    {removed:5.3f}  {bar}".rstrip())
    return "\n".join(lines)


def _binomial(count: int, probability: float) -> np.ndarray:
    """Probability of 0, 1, ... count successes."""
    return np.array(
        [math.comb(count, k) * probability**k * (1.0 - probability) ** (count - k) for k in range(count + 1)]
    )
