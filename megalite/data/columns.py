"""One-dimensional .npy files of our own, mapped: a closed world, as `records.py` is for JSON.

numpy's reader evaluates the header as Python and takes any type and shape from it. Here the header is what numpy writes
for a plain array of one type, and the file is exactly as long as the header says.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from megalite.errors import DataError

MAGIC = b"\x93NUMPY\x01\x00"

_HEADER = re.compile(rb"\{'descr': '([^']{2,8})', 'fortran_order': False, 'shape': \((\d{1,19}),\), \} *\n")


def map_column(path: Path, dtype: np.dtype | type, advice: str) -> np.ndarray:
    """The numbers in a .npy file, mapped and not to be written to.

    Args:
        path: the file.
        dtype: of the numbers.
        advice: what to do when it holds something else.

    Raises:
        DataError: it is missing, cannot be read or holds something else.
    """
    dtype = np.dtype(dtype)
    try:
        num_bytes = path.stat().st_size
        with open(path, "rb") as file:
            start = file.read(len(MAGIC) + 2)
            header = file.read(int.from_bytes(start[len(MAGIC) :], "little"))
        size, problem = _size(start, header, num_bytes, dtype)
        if problem:
            raise DataError(f"{path}: {problem}; {advice}")
        if size == 0:
            return np.zeros(0, dtype)
        return np.memmap(path, dtype, "r", len(start) + len(header), (size,)).view(np.ndarray)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); {advice}") from error


def _size(start: bytes, header: bytes, num_bytes: int, dtype: np.dtype) -> tuple[int, str]:
    """How many numbers there are, or what is wrong with the file."""
    found = _HEADER.fullmatch(header)
    if not start.startswith(MAGIC) or found is None:
        return 0, f"damaged: not a .npy file of a row of {dtype}"
    if found[1].decode("latin-1") != dtype.str:
        return 0, f"damaged: {found[1].decode('latin-1')} found, {dtype.str} ({dtype}) expected"
    size = int(found[2])
    expected = len(start) + len(header) + size * dtype.itemsize
    if num_bytes != expected:
        return 0, f"damaged: {num_bytes} bytes found, {expected} expected for {size} numbers"
    return size, ""
