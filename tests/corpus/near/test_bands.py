"""Band keys and their partitions, against comparing the bands themselves."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from megalite.corpus.near.bands import band_entries, slice_of_partition, sort_entries
from megalite.corpus.near.minhash import EMPTY
from megalite.corpus.near.settings import Banding


def random_signatures(num_documents: int, num_hashes: int, *, num_values: int = 2) -> np.ndarray:
    """Signatures of few different values, so that bands often agree."""
    rng = np.random.default_rng(0)
    return rng.integers(0, num_values, (num_documents, num_hashes)).astype(np.uint32)


def test_keys_are_equal_where_bands_are():
    """Same band and same values give the same key; another band with the same values another one."""
    bands, rows = 4, 3
    signatures = random_signatures(60, 13)
    keys, documents = band_entries(signatures, Banding(bands, rows), first_row=0)
    assert documents.tolist() == np.repeat(np.arange(60), bands).tolist()
    contents = [
        (band, tuple(signatures[document, band * rows : (band + 1) * rows]))
        for document in range(60)
        for band in range(bands)
    ]
    by_key = dict(zip(keys.tolist(), contents, strict=True))
    assert [by_key[key] for key in keys.tolist()] == contents
    assert len(by_key) == len(set(contents))


def test_documents_without_shingles_have_no_key():
    """Two empty documents are not alike."""
    signatures = random_signatures(5, 8)
    signatures[[1, 3]] = EMPTY
    keys, rows = band_entries(signatures, Banding(4, 2), first_row=100)
    assert keys.size == rows.size == 12
    assert sorted(set(rows.tolist())) == [100, 102, 104]


@pytest.mark.parametrize("num_partitions", [1, 2, 3, 7, 64])
def test_partitions_share_out_all_keys(num_partitions):
    """Every key, the very first and last possible included, is in one partition, and they are about equally large."""
    rng = np.random.default_rng(1)
    keys = rng.integers(0, 2**64, 20_000, dtype=np.uint64)
    borders = [partition * 2**64 // num_partitions + step for partition in range(num_partitions) for step in (-1, 0, 1)]
    keys = np.append(keys, np.array([0, 2**64 - 1, *(b for b in borders if 0 <= b < 2**64)], np.uint64))
    keys, _ = sort_entries(keys, np.arange(keys.size, dtype=np.uint32))
    slices = [slice_of_partition(keys, partition, num_partitions) for partition in range(num_partitions)]
    np.testing.assert_array_equal(np.concatenate([keys[part] for part in slices]), keys)
    for partition, part in enumerate(slices):
        assert all(int(key) * num_partitions // 2**64 == partition for key in keys[part])
        assert part.stop - part.start > 0.7 * keys.size / num_partitions


def test_sorting_keeps_documents_of_one_key_in_order():
    """Ties stay as they came, so that the first document of a bucket is the first of the data."""
    keys = np.array([5, 2, 5, 2, 5], np.uint64)
    keys, rows = sort_entries(keys, np.arange(5, dtype=np.uint32))
    assert (keys.tolist(), rows.tolist()) == ([2, 2, 5, 5, 5], [1, 3, 0, 2, 4])


def test_stored_keys_stay_valid():
    """The keys are part of the format of an index: a change must raise index.FORMAT."""
    keys, _ = band_entries(random_signatures(3, 16, num_values=1000), Banding(4, 4), first_row=0)
    assert xxhash.xxh3_64_hexdigest(keys.tobytes()) == "86f620b12aca7127"
