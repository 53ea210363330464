"""Eight bits for a number of optimizer state, in blocks with a scale each (Dettmers et al. 2022, sections 2 and 3).

A block's largest magnitude is its scale; every number is stored as the nearest entry of a table times that scale. The
table is dynamic: entries lie close where numbers are small, over seven decades, as optimizer state spreads.

    signed     0, and +- 127 magnitudes; +1 and -1 among them, so that packing what was unpacked changes nothing
    unsigned   0, and 255 magnitudes

A number that is not zero never becomes zero in the unsigned table: it holds the root of a second moment, and the update
is divided by it. Only what is below `FLOOR`, far below any eps, does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from megalite.optim.rules import BLOCK_SIZE

DECADES = 7
FLOOR = 1e-15
"""Smaller results are zero. Their squares would be too near to fp32's smallest number to survive unpacking."""


@dataclass
class Packed:
    """Numbers in 8 bits."""

    codes: Tensor
    """uint8 `[n]`"""
    scales: Tensor
    """fp32 `[ceil(n / BLOCK_SIZE)]`"""
    signed: bool

    def part(self, run: slice) -> Packed:
        """Views of a run of numbers that begins with a block."""
        assert run.start % BLOCK_SIZE == 0
        return Packed(self.codes[run], self.scales[run.start // BLOCK_SIZE : -(-run.stop // BLOCK_SIZE)], self.signed)


class CodeTable:
    """What codes stand for.

    The nearest entry is found by the upper half of a number's bits: entries lie so far apart that among all numbers
    with one upper half the code changes once at most, and one comparison tells. The binary search of `torch.bucketize`
    takes eight of them, and on a CPU eight times as long.
    """

    def __init__(self, entries: Tensor, device: torch.device):
        borders = ((entries[1:] + entries[:-1]) / 2).float()
        halves = torch.arange(2**16, dtype=torch.int32) << 16
        ends = torch.stack([halves, halves | 0xFFFF]).view(torch.float32)
        ends = torch.where(ends.isfinite().all(dim=0), ends, 0.0)
        first, last = torch.bucketize(ends, borders).aminmax(dim=0)
        assert int((last - first).max()) == 1
        self.entries = entries.float().to(device)
        """In rising order, fp32."""
        self._first = first.int().to(device)
        self._borders = torch.cat([borders, torch.tensor([torch.inf])]).to(device)

    def nearest(self, numbers: Tensor) -> Tensor:
        """The code of the nearest entry of each flat, finite fp32 number: int32."""
        codes = self._first.index_select(0, (numbers.view(torch.int32) >> 16) & 0xFFFF)
        return codes + (numbers > self._borders.index_select(0, codes))


def zeros(size: int, *, signed: bool, device: torch.device) -> Packed:
    """Packed zeros."""
    codes = torch.full((size,), _zero_code(signed), dtype=torch.uint8, device=device)
    return Packed(codes, torch.zeros(-(-size // BLOCK_SIZE), device=device), signed)


def pack(numbers: Tensor, packed: Packed) -> None:
    """Store flat fp32 numbers, in place."""
    blocks = _blocks(numbers)
    scales = blocks.abs().amax(dim=1)
    divisors = torch.where(scales > 0, scales, 1.0).unsqueeze(1)
    table = _table(packed.signed, numbers.device)
    codes = table.nearest((blocks / divisors).view(-1))
    if not packed.signed:
        codes.clamp_(min=1).masked_fill_(blocks.view(-1) <= 0, 0)
    results = table.entries.index_select(0, codes).view(blocks.shape).mul_(scales.unsqueeze(1))
    codes.masked_fill_(results.view(-1).abs_() < FLOOR, _zero_code(packed.signed))
    packed.codes.copy_(codes[: numbers.numel()])
    packed.scales.copy_(scales)


def unpack(packed: Packed) -> Tensor:
    """The numbers, flat and fp32."""
    table = _table(packed.signed, packed.codes.device)
    blocks = _blocks(table.entries.index_select(0, packed.codes.int()))
    return (blocks * packed.scales.unsqueeze(1)).view(-1)[: packed.codes.numel()]


def _blocks(numbers: Tensor) -> Tensor:
    """`[blocks, BLOCK_SIZE]`, the last one filled up with zeros."""
    missing = -numbers.numel() % BLOCK_SIZE
    return torch.nn.functional.pad(numbers, (0, missing)).view(-1, BLOCK_SIZE)


def _zero_code(signed: bool) -> int:
    return 127 if signed else 0


@cache
def _table(signed: bool, device: torch.device) -> CodeTable:
    magnitudes: list[float] = []
    for decade in range(DECADES):
        count = 2**decade * (1 if signed else 2)
        edges = [0.1 + 0.9 * index / count for index in range(count + 1)]
        middles = [(low + high) / 2 for low, high in pairwise(edges)]
        magnitudes += [10.0 ** (decade - DECADES + 1) * middle for middle in middles]
    magnitudes = [*magnitudes[:-1], 1.0] if signed else [*magnitudes, 1.0]
    entries = [*(-value for value in reversed(magnitudes)), 0.0, *magnitudes] if signed else [0.0, *magnitudes]
    return CodeTable(torch.tensor(entries, dtype=torch.float64), device)
