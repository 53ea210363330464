"""Mutations of plain data, of text and of bytes."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 64, 100, 4095, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 10**30, -(10**18)),
    *(0.0, -0.0, 0.1, 0.5, 1.5, 1e-300, 1e300, 1e18, float("inf"), float("nan"), -1e-5),
    *("", " ", "x", "null", "auto", "on", "fp32", "bf16", "../..", "/dev/null", "a\nb", "\x00"),
    *("é\u202e", "x" * 5000, "1e9"),
    *([], [[]], [None], [0], [-1, 2**62], ["x", 1], {}, {"": {}}, {"x": [1, {"y": None}]}, [{}] * 40),
)


def values_like(value: Any) -> tuple[Any, ...]:
    """Values near one of the same kind."""
    if isinstance(value, bool) or value is None:
        return (True, False, None)
    if isinstance(value, int):
        return (value + 1, value - 1, 2 * value, value // 2, -value, 3, 1, value * 1024)
    if isinstance(value, float):
        return (value * 2, value / 3, -value, value + 1.0, 1.0, 0.0)
    if isinstance(value, str):
        return (value.upper(), value + "x", value[:-1], value[::-1], f" {value}")
    return ()


def paths_of(data: Any, prefix: tuple = ()) -> list[tuple]:
    """The way to every value inside plain data."""
    pairs = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path for key, value in pairs for path in ((*prefix, key), *paths_of(value, (*prefix, key)))]


def with_value(data: Any, path: Sequence, value: Any) -> Any:
    """A copy of plain data with another value at the end of a path."""
    data = copy.deepcopy(data)
    *way, last = path
    holder = data
    for key in way:
        holder = holder[key]
    holder[last] = value
    return data


def mutate(data: Any, rng: random.Random, num_changes: int = 1) -> Any:
    """A copy with some values replaced, left out, doubled, or given neighbours."""
    data = copy.deepcopy(data)
    for _ in range(num_changes):
        paths = paths_of(data)
        if not paths:
            return copy.deepcopy(rng.choice(ODD_VALUES))
        *way, last = rng.choice(paths)
        holder = data
        for key in way:
            holder = holder[key]
        _change(holder, last, rng)
    return data


def _change(holder: Any, key: Any, rng: random.Random) -> None:
    kind = rng.random()
    near = values_like(holder[key])
    if kind < 0.35 and near:
        holder[key] = rng.choice(near)
    elif kind < 0.75:
        holder[key] = copy.deepcopy(rng.choice(ODD_VALUES))
    elif kind < 0.85:
        del holder[key]
    elif isinstance(holder, dict):
        holder[rng.choice(("unknown", f"{key}s", "", "a.b", 3))] = copy.deepcopy(holder[key])
    else:
        holder.insert(0, copy.deepcopy(holder[key]))


def mutate_text(text: str, rng: random.Random, pieces: tuple[str, ...]) -> str:
    """A text with parts cut, moved, doubled, or with some of `pieces` put in."""
    for _ in range(rng.randint(1, 4)):
        start = rng.randint(0, len(text))
        stop = min(len(text), start + rng.randint(0, 30))
        kind = rng.randrange(5)
        if kind == 0:
            text = text[:start] + text[stop:]
        elif kind == 1:
            text = text[:start] + rng.choice(pieces) + text[start:]
        elif kind == 2:
            text = text[:start] + text[start:stop] * rng.randint(2, 50) + text[stop:]
        elif kind == 3:
            text = text[:start] + chr(rng.randrange(0xD800)) + text[stop:]
        else:
            text = text[:start]
    return text


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Bytes with some flipped, cut, put in, doubled or set to a pattern."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        start = rng.randint(0, len(changed))
        size = rng.choice((1, 1, 2, 4, 8, 64))
        kind = rng.randrange(6)
        if kind == 0 and changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del changed[start : start + size]
        elif kind == 2:
            changed[start:start] = rng.randbytes(size)
        elif kind == 3:
            changed[start : start + size] = bytes([rng.choice((0, 0xFF, 0x7F, 0x80))]) * size
        elif kind == 4:
            changed[start : start + 8] = rng.choice((1, 2**31, 2**40, 2**62, 2**64 - 1)).to_bytes(8, "little")
        else:
            del changed[start:]
    return bytes(changed)
