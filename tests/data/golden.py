"""Documents and hashes for tests that pin what runs of the past have read: no random numbers of any library."""

from __future__ import annotations

import hashlib

import numpy as np


def fixed_documents(num_documents: int, seed: int = 0) -> list[np.ndarray]:
    """Documents of 1 to 61 tokens by plain arithmetic."""
    lengths = [1 + (7919 * (number + seed) ** 2 + 31 * number) % 61 for number in range(num_documents)]
    return [
        np.array([3 + (number * 131 + place * 17 + place * place) % 990 for place in range(length)])
        for number, length in enumerate(lengths)
    ]


def hash_of(*arrays: np.ndarray) -> str:
    """Of types, shapes and contents."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]
