"""Chunks of a tensor's bytes: their hashes, and how they are packed.

fp32 numbers of a trained tensor differ in every bit of the mantissa, which no compressor can shrink, and agree nearly
in sign and exponent. Shuffling puts the first bytes of all numbers together, then the second bytes and so on, so that
zstd finds the exponents in one run and gives up on the rest at once:

    numbers   s0 e0 m0 m0 | s1 e1 m1 m1 | ...      ->      m0 m1 ... | m0 m1 ... | e0 e1 ... | s0 s1 ...

It saves a sixth of dense state, at 1 GB/s a core (docs/checkpoints.md): worth it for slow or small disks, hence off
unless asked for. A chunk that does not shrink is stored as it is.
"""

from __future__ import annotations

import numpy as np
import xxhash

from megalite.errors import CheckpointError

CHUNK_BYTES = 4 * 2**20
"""Smaller chunks find more that is equal and cost more manifest: 4 MiB is 9 bytes of it for a million."""

ITEM_BYTES = 4
PLAIN, SHUFFLED_ZSTD = "", "shuffle4+zstd"
ZSTD_LEVEL = 1
"""Level 3 is slower and no smaller: 0.856 of a trained model's weights, against 0.843."""


def hash_chunks(data: np.ndarray, chunk_bytes: int) -> tuple[str, ...]:
    """xxh3_128 of each chunk of an array of bytes.

    The hash is not meant to withstand someone who makes collisions on purpose; by chance two chunks of a run collide
    with a probability far below that of a flipped bit that every checksum misses.
    """
    return tuple(
        xxhash.xxh3_128_hexdigest(data[start : start + chunk_bytes].data) for start in range(0, len(data), chunk_bytes)
    )


def pack(data: np.ndarray) -> tuple[np.ndarray | bytes, str]:
    """A chunk as it is to be stored, and the codec that says how."""
    import zstandard

    packed = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(_shuffle(data).data)
    return (packed, SHUFFLED_ZSTD) if len(packed) < len(data) else (data, PLAIN)


def unpack(stored: np.ndarray, num_bytes: int, codec: str, origin: object) -> np.ndarray:
    """A chunk's bytes from what was stored.

    Raises:
        CheckpointError: they are damaged, or packed in a way that this version does not know; `origin` is named.
    """
    if codec == PLAIN:
        return stored
    if codec != SHUFFLED_ZSTD:
        raise CheckpointError(f"{origin}: packed as {codec!r}, which this megalite does not know; upgrade it")
    import zstandard

    try:
        promised = zstandard.frame_content_size(stored.data)  # what it would allocate
        if promised != num_bytes:
            raise CheckpointError(f"{origin}: damaged ({promised} bytes packed, expected {num_bytes})")
        data = zstandard.ZstdDecompressor().decompress(stored.data)
    except zstandard.ZstdError as error:
        raise CheckpointError(f"{origin}: damaged ({error})") from error
    return _unshuffle(np.frombuffer(data, np.uint8))


def _shuffle(data: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(data.reshape(-1, ITEM_BYTES).T).reshape(-1)


def _unshuffle(data: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(data.reshape(ITEM_BYTES, -1).T).reshape(-1)
