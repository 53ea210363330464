"""`numba.njit` for all kernels of the data tools, with a cache on disk that notices every change of a package.

numba keeps compiled code until the file of the function itself changes. Kernels call each other across files, so an
edit of one would leave its old code inside the others, without a word: after a `git pull`, say. Here the name under
which a kernel is cached holds a hash of all files of its folder; an edit anywhere in it compiles them anew, once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numba


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function of arrays and numbers at its first call; other threads run meanwhile."""
    return numba.njit(cache=True, nogil=True)(named_by_sources(function))


def named_by_sources(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, its qualified name followed by a hash of the Python files of its folder."""
    folder = Path(function.__globals__["__file__"]).parent
    function.__qualname__ = f"{function.__qualname__}_{_hash_once(folder)}"
    return function


def hash_of_sources(folder: Path) -> str:
    """A hash of all Python files of a folder, 16 hexadecimal digits."""
    content = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        content.update(f"{path.name}:".encode() + path.read_bytes())
    return content.hexdigest()[:16]


_hash_once = lru_cache(hash_of_sources)
