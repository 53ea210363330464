"""Kernels without reference counts: `numba.njit` as the kernels of this package need it.

numba would count a reference up and down for every array at every call, with an atomic operation, also where a function
of a few instructions is called for each character: that took two thirds of all time. The price is that a kernel cannot
make an array; it is given room to write to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from megalite.data.kernel import named_by_sources


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function at its first call. It takes arrays and numbers, makes no array, and lets other threads run."""
    return numba.njit(cache=True, nogil=True, _nrt=False)(named_by_sources(function))


def read_only(array: np.ndarray) -> np.ndarray:
    """The array, not to be written to: one type for numba, whether it comes from Arrow or from a kernel."""
    view = array.view()
    view.setflags(write=False)
    return view
