"""Damage as disks, copies and people do it: seeded changes of files."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.fuzz.mutate import mutate

Change = Callable[[bytes, random.Random, Sequence[bytes]], bytes]
"""New content of a file, from the old one and those of its neighbours."""


def flip_bit(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]


def change_bytes(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    at, count = rng.randrange(len(data)), rng.choice([1, 2, 4, 8])
    return data[:at] + rng.randbytes(min(count, len(data) - at)) + data[at + count :]


def truncate(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    return data[: rng.choice([0, 1, len(data) // 2, len(data) - 8, len(data) - 1, rng.randrange(len(data))])]


def extend(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    return data + rng.choice([b"\0", b"\0" * 8, data[-16:], rng.randbytes(rng.randrange(1, 64))])


def zero_block(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    at, size = rng.randrange(len(data)), rng.choice([4, 64, 512, 4096])
    return data[:at] + b"\0" * min(size, len(data) - at) + data[at + size :]


def swap_blocks(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    size = rng.choice([2, 8, 64, 512])
    if len(data) < 2 * size:
        return data[::-1]
    first, second = sorted(rng.sample(range(len(data) // size), 2))
    a, b = (data[n * size : (n + 1) * size] for n in (first, second))
    return data[: first * size] + b + data[(first + 1) * size : second * size] + a + data[(second + 1) * size :]


def repeat_block(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    at, size = rng.randrange(len(data)), rng.choice([1, 8, 512])
    return data[: at + size] + data[at:]


def drop_block(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    at, size = rng.randrange(len(data)), rng.choice([1, 8, 512])
    return data[:at] + data[at + size :]


def take_neighbour(data: bytes, rng: random.Random, neighbours: Sequence[bytes]) -> bytes:
    return rng.choice(list(neighbours))


CHANGES: tuple[Change, ...] = (
    flip_bit,
    change_bytes,
    truncate,
    extend,
    zero_block,
    swap_blocks,
    repeat_block,
    drop_block,
    take_neighbour,
)


def change_json(data: bytes, rng: random.Random, _: Sequence[bytes] = ()) -> bytes:
    """One value of a JSON text taken away, doubled, renamed or replaced by an odd one."""
    return json.dumps(mutate(json.loads(data), rng), indent=2).encode()


@contextmanager
def mutated(path: Path, change: Change, rng: random.Random) -> Iterator[bool]:
    """A file changed in its place, and put back; whether it is another one now."""
    data = path.read_bytes()
    neighbours = [other.read_bytes() for other in sorted(path.parent.iterdir()) if other.is_file() and other != path]
    changed = change(data, rng, neighbours or [b""])
    path.write_bytes(changed)
    try:
        yield changed != data
    finally:
        path.write_bytes(data)
