"""Bytes of a number that travels in 4 or 8 bits, by arithmetic alone: the planner counts by it (`engine.wire`)."""

from __future__ import annotations

BLOCK = 256
"""Neighbouring numbers that share a scale. Fewer are rounded more finely; a scale of fp32 then weighs more."""

SCALE_BYTES = 4

PIECE_BLOCKS = 2**14
"""Rounded at once: 4 million numbers, so that what is made of them in fp32 on the way stays small."""

ROUNDED_BUCKET = 40_000_000
"""Numbers that are rounded and sent at once: those of a bucket (`native.buckets.BUCKET_NUMBERS`)."""

UNDER_WAY = 2
"""The native engine's messages of gradients that are left alone when the next is sent: each has the time of so many
buckets' backward pass."""


def message_bytes(num_numbers: int, bits: int) -> int:
    """Of whole blocks."""
    assert num_numbers % BLOCK == 0, f"{num_numbers} numbers are no whole blocks"
    return num_numbers // BLOCK * (SCALE_BYTES + BLOCK * bits // 8)


def bytes_per_number(bits: int) -> float:
    """1.016 in 8 bits, 0.516 in 4."""
    return bits / 8 + SCALE_BYTES / BLOCK
