"""Arrays in .npy files that come from outside, or from an earlier run: read whole, or refused by name."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import numpy as np

from megalite.errors import DataError

DAMAGE = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    EOFError,
    SyntaxError,
    OverflowError,
    MemoryError,
    NotImplementedError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
)
"""What numpy raises on a .npy or .npz file that is empty, cut, has flipped bytes, or is something else."""


def load_array(path: Path, advice: str, *, mapped: bool = False) -> np.ndarray:
    """The array in a .npy file.

    Args:
        path: the file.
        advice: what to do when it is none.
        mapped: share it with other processes, and read of it only what is used.

    Raises:
        DataError: it is missing, cannot be read, or holds no array of numbers.
    """
    try:
        array = np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing; {advice}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}); {advice}") from error
    except DAMAGE as error:
        raise DataError(f"{path}: damaged, or no .npy file ({error}); {advice}") from error
    if not isinstance(array, np.ndarray):
        array.close()
        raise DataError(f"{path}: several arrays (.npz), expected one (.npy); {advice}")
    return array
