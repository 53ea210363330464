"""`numba.njit` for all kernels of the data tools, with a cache on disk that notices every change of their sources.

Workers that start together all find the cache empty. The first one compiles, the others wait for it and read its code:

    worker 0   lock | compile ......... save | unlock
    worker 1   wait .........................| lock | read | unlock
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numba
import numpy as np
from numba.core.compiler_lock import global_compiler_lock
from numba.core.types import unliteral

from megalite.kernel_cache import LOCK_FILE, hash_of_sources


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function of arrays and numbers at its first call; other threads run meanwhile."""
    return compiled_once(numba.njit(cache=True, nogil=True)(named_by_sources(function)))


def bare_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel` for a function that makes no array and is given room to write to, and only calls such functions.

    numba else counts a reference up and down for every array at every call, with an atomic operation, also where a
    function of a few instructions is called for each character: that took two thirds of all time.
    """
    bare = numba.njit(cache=True, nogil=True, _nrt=False)  # type: ignore[call-overload]  # an option not in its stubs
    return compiled_once(bare(named_by_sources(function)))


def read_only(array: np.ndarray) -> np.ndarray:
    """The array, not to be written to: one type for numba, whether it comes from Arrow or from a kernel."""
    view = array.view()
    view.setflags(write=False)
    return view


def compiled_once(dispatcher: Any) -> Any:
    """What njit returned, which from now on compiles only while no other process does, and not for single numbers.

    A kernel that is given a constant by another one is else compiled for this number, and for all numbers as soon as a
    loop changes it: half of all compiling was for nothing. Where a constant helps, LLVM finds it when it inlines.
    """
    compile_now, template_now = dispatcher.compile, dispatcher.get_call_template

    def compile_alone(signature: Any) -> Any:
        with global_compiler_lock, _PROCESS_LOCK.at(Path(dispatcher.stats.cache_path)):
            return compile_now(signature)  # looks into the cache first

    def template_of_types(args: Any, kws: Any) -> Any:
        return template_now(tuple(map(unliteral, args)), {name: unliteral(each) for name, each in kws.items()})

    dispatcher.compile, dispatcher.get_call_template = compile_alone, template_of_types
    return dispatcher


class _ProcessLock:
    """A lock file, held from the outermost kernel on: what that calls is compiled under it too.

    A process holds one at most, so that none waits for another in a circle. Used under numba's own lock of threads.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._folder = Path()
        self._file: IO[bytes] | None = None

    def at(self, folder: Path) -> _ProcessLock:
        """The lock of a folder, unless one is held already."""
        if self._depth == 0:
            self._folder = folder
        return self

    def __enter__(self) -> None:
        if self._depth == 0:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._file = open(self._folder / LOCK_FILE, "ab")
                fcntl.flock(self._file, fcntl.LOCK_EX)
            except OSError:  # a disk without locks, or one that is read only: the code is compiled twice, and is right
                self._close()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()  # which unlocks
            self._file = None


_PROCESS_LOCK = _ProcessLock()


def named_by_sources(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, its qualified name followed by a hash of the files that it is made from (`kernel_cache.py`)."""
    path = Path(function.__globals__["__file__"])
    function.__qualname__ = f"{function.__qualname__}_{hash_of_sources(path)}"
    return function
