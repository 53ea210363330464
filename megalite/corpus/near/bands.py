"""Band keys: documents that agree in a whole band get one 64-bit key, and meet where equal keys are brought together.

    signature  [ 7 3 3 | 9 7 9 | 1 1 4 ]          3 bands of 3 rows
    keys         k0      k1      k2               a hash of the band's number and its values

The entries (key, document) of a shard are stored sorted by key. Partition p of P is a range of keys, so any number of
partitions can be cut from the same files by bisection: whoever groups them chooses P by the memory there is.
"""

from __future__ import annotations

import numpy as np

from megalite.corpus.near.minhash import EMPTY, mix
from megalite.corpus.near.settings import Banding
from megalite.kernel import kernel

_STEP = np.uint64(0x9E3779B97F4A7C15)


def band_entries(signatures: np.ndarray, banding: Banding, first_row: int) -> tuple[np.ndarray, np.ndarray]:
    """The keys of some documents; those without a shingle have none.

    Args:
        signatures: uint32 [documents, num_hashes].
        banding: how they are cut.
        first_row: number of the first of them in its shard.

    Returns:
        keys uint64 [entries] and rows uint32 [entries].
    """
    documents = np.flatnonzero(signatures[:, 0] != EMPTY)
    keys = _band_keys(signatures, documents, banding.bands, banding.rows)
    return keys.reshape(-1), np.repeat((documents + first_row).astype(np.uint32), banding.bands)


def sort_entries(keys: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """By key, and by row where keys are equal; the rows must be ascending before."""
    order = np.argsort(keys, kind="stable")
    return keys[order], rows[order]


def slice_of_partition(keys: np.ndarray, partition: int, num_partitions: int) -> slice:
    """Which of the sorted keys belong to partition p of P: those from p 2^64 / P to (p + 1) 2^64 / P."""
    low, high = (-(-number * 2**64 // num_partitions) for number in (partition, partition + 1))
    begin = int(np.searchsorted(keys, np.uint64(low)))
    end = keys.size if high == 2**64 else int(np.searchsorted(keys, np.uint64(high)))
    return slice(begin, end)


@kernel
def _band_keys(signatures: np.ndarray, documents: np.ndarray, bands: int, rows: int) -> np.ndarray:
    """uint64 [documents, bands]"""
    keys = np.empty((documents.size, bands), np.uint64)
    for place in range(documents.size):
        signature = signatures[documents[place]]
        for band in range(bands):
            key = mix(np.uint64(band) + _STEP)
            for row in range(band * rows, (band + 1) * rows):
                key = mix((key ^ np.uint64(signature[row])) + _STEP)
            keys[place, band] = key
    return keys
