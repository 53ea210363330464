"""Copying many ranges of bytes at once. Imports numba at import; import it where the work begins."""

from __future__ import annotations

import numpy as np

from megalite.kernel import kernel


@kernel
def copy_ranges(
    source: np.ndarray, starts: np.ndarray, lengths: np.ndarray, target: np.ndarray, places: np.ndarray
) -> None:
    """Copy `lengths[i]` bytes from `source[starts[i]:]` to `target[places[i]:]`, for every i."""
    for row in range(starts.size):
        start, place = starts[row], places[row]
        for byte in range(lengths[row]):
            target[place + byte] = source[start + byte]
