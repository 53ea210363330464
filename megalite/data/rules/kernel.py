"""`numba.njit` as the kernels of this package need it.

Its cache on disk notices every change of the package. numba keeps compiled code until the file of the function itself
changes. These kernels call each other across files, so an edit of one would leave old code of it inside the others,
without a word. Here the name under which a kernel is cached holds a hash of the whole package: an edit anywhere
compiles all of it anew, once.

And it counts no references. numba would count one up and down for every array at every call, with an atomic operation,
also where a function of a few instructions is called for each character: that took two thirds of all time. The price
is that a kernel cannot make an array; it is given room to write to.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np


def hash_of_sources(folder: Path) -> str:
    """A hash of all Python files of a folder, 16 hexadecimal digits."""
    content = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        content.update(f"{path.name}:".encode() + path.read_bytes())
    return content.hexdigest()[:16]


SOURCES = hash_of_sources(Path(__file__).parent)


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function at its first call. It takes arrays and numbers, makes no array, and lets other threads run."""
    function.__qualname__ = f"{function.__qualname__}_{SOURCES}"
    return numba.njit(cache=True, nogil=True, _nrt=False)(function)


def read_only(array: np.ndarray) -> np.ndarray:
    """The array, not to be written to: one type for numba, whether it comes from Arrow or from a kernel."""
    view = array.view()
    view.setflags(write=False)
    return view
