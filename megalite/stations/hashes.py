"""Hashes of files (xxh3_128): of all of a file, of stretches that many can share the checking of, of some places of it.

|chunk 0          |chunk 1          |chunk 2   |      256 MB each: `data.verify`, every rank its share
 ==  ==  ==  ==  ==  ==  ==  ==  ==  ==  ==  ==       64 places of 16 kB: at each opening, however large the file
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import xxhash

BLOCK_BYTES = 1 << 22

CHUNK_BYTES = 1 << 28
"""Stretches of a large file that have a hash of their own."""

NUM_SPOTS, SPOT_BYTES = 64, 1 << 14
"""Places of a file that are looked at before training, evenly spread, both ends among them, and the bytes of each. A
file that is no larger than all of them together is looked at as a whole."""


class FileHashes(NamedTuple):
    """What is written down of a file."""

    num_bytes: int
    xxh3: str
    spots: str
    """Empty where the file is small."""
    chunks: tuple[str, ...]
    """Empty where it has only one."""


def is_small(num_bytes: int) -> bool:
    """Whether a file is looked at as a whole, where of larger ones some places are."""
    return num_bytes <= NUM_SPOTS * SPOT_BYTES


def hash_file(path: Path, start: int = 0, stop: int | None = None) -> str:
    """Hash of a file's bytes, or of those from `start` to `stop`."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        file.seek(start)
        left = path.stat().st_size - start if stop is None else stop - start
        while left > 0 and (block := file.read(min(left, BLOCK_BYTES))):
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()


def hash_inputs(path: Path) -> list[tuple[Path | str, str]]:
    """Every file below a path, or itself, and its hash: what a station reads besides documents."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    return [(file, hash_file(file)) for file in files]


def hash_sampled_bytes(path: Path) -> str:
    """Hash of NUM_SPOTS places of a file that is not small."""
    digest = xxhash.xxh3_128()
    last = path.stat().st_size - SPOT_BYTES
    with open(path, "rb", buffering=0) as file:
        for number in range(NUM_SPOTS):
            file.seek(last * number // (NUM_SPOTS - 1))
            digest.update(file.read(SPOT_BYTES))
    return digest.hexdigest()


def hash_all(path: Path) -> FileHashes:
    """All hashes of a file, read once (and its places once more)."""
    whole, chunk = xxhash.xxh3_128(), xxhash.xxh3_128()
    chunks, num_bytes = [], 0
    with open(path, "rb") as file:
        while block := file.read(min(BLOCK_BYTES, CHUNK_BYTES - num_bytes % CHUNK_BYTES)):
            whole.update(block)
            chunk.update(block)
            num_bytes += len(block)
            if num_bytes % CHUNK_BYTES == 0:
                chunks.append(chunk.hexdigest())
                chunk.reset()
    if num_bytes % CHUNK_BYTES:
        chunks.append(chunk.hexdigest())
    spots = "" if is_small(num_bytes) else hash_sampled_bytes(path)
    return FileHashes(num_bytes, whole.hexdigest(), spots, tuple(chunks) if len(chunks) > 1 else ())
