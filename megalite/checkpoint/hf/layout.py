"""Where a canonical weight lies in a tensor of transformers: alone, fused with others, or transposed.

One formula covers all of them. The rows of `num_parts` equally large weights are dealt out in groups:

    group 0 of part 0 | group 0 of part 1 | ... | group 1 of part 0 | ...

    alone                  one part
    GPT-2's c_attn         q, k, v; a group is a whole part:   q | k | v
    GPT-NeoX's fused qkv   q, k, v; a group is a head:         q0 k0 v0 | q1 k1 v1 | ...

A transposed tensor (GPT-2's Conv1D) is stored with its dims swapped after that.

Weights are read, converted and compared in blocks of rows, so that memory does not grow with them. Only where a weight
lies across its tensor (transposed, or a whole part of it) is a tensor taken as one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from megalite.architecture.architecture import Architecture
from megalite.architecture.weights import Rectangle, Weight, weight_table
from megalite.checkpoint.hf.family import QKV, Family

BLOCK_BYTES = 2 * 2**20
"""Of fp32 in memory at a time: large against the cost of a call, small enough for a core's own cache."""


@dataclass(frozen=True)
class Place:
    """The place of one canonical weight."""

    tensor: str
    """Name of the tensor in the Hugging Face folder."""
    group: int
    """Rows of the weight that lie together."""
    part: int = 0
    num_parts: int = 1
    transposed: bool = False

    def renamed(self, tensor: str) -> Place:
        """The same place in a tensor of another name."""
        return replace(self, tensor=tensor)

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the tensor that holds a weight of this shape."""
        stored = (shape[0] * self.num_parts, *shape[1:])
        return stored[::-1] if self.transposed else stored

    def rows_together(self, num_rows: int) -> int:
        """How many of a weight's rows have to be laid out at a time: all of them where the tensor is transposed."""
        if self.transposed:
            return num_rows
        return self.group if self.num_parts > 1 else 1

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Where rows `start` to `stop` of the weight begin in the tensor: (row there, number of rows) for each run."""
        while start < stop:
            index, offset = divmod(start, self.group)
            size = min(stop - start, self.group - offset)
            yield (index * self.num_parts + self.part) * self.group + offset, size
            start += size


def whole(weight: Weight) -> Rectangle:
    """All of a weight."""
    return Rectangle((0,) * len(weight.shape), weight.shape)


def row_blocks(shape: tuple[int, ...], *, multiple: int = 1, num_parts: int = 1) -> Iterator[Rectangle]:
    """Cut a weight into runs of rows of about BLOCK_BYTES.

    Args:
        shape: of the weight.
        multiple: of rows in a block.
        num_parts: weights that are read side by side.
    """
    row_bytes = prod(shape[1:]) * torch.float32.itemsize * num_parts
    num_rows = max(1, BLOCK_BYTES // (row_bytes * multiple)) * multiple
    for start in range(0, shape[0], num_rows):
        size = min(num_rows, shape[0] - start)
        yield Rectangle((start, *(0 for _ in shape[1:])), (size, *shape[1:]))


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread: blocks are too small to share, and threads that wait for one another spin meanwhile.

    On two busy cores, converting a GB took 12 s of CPU with two threads and 0.4 with one.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def join(parts: Sequence[Tensor], place: Place) -> Tensor:
    """The tensor that holds the given weights, all of its parts in order."""
    assert len(parts) == place.num_parts
    stored = parts[0]
    if place.num_parts > 1:
        stored = torch.stack([part.unflatten(0, (-1, place.group)) for part in parts], dim=1).flatten(0, 2)
    return (stored.t() if place.transposed else stored).contiguous()


def places(model: Architecture, family: Family) -> dict[str, Place]:
    """The place of every canonical weight of a filled model, by canonical name."""
    return {weight.name: _place(weight, family, model.head_dim) for weight in weight_table(model).values()}


def _place(weight: Weight, family: Family, head_dim: int) -> Place:
    if weight.name in family.outer:
        return Place(family.outer[weight.name], group=weight.shape[0])
    _, index, inner = weight.name.split(".", 2)
    stem, kind = inner.rsplit(".", 1)
    tensor = f"{family.blocks}.{index}.{family.inner[stem]}.{kind}"
    transposed = family.transposed and len(weight.shape) == 2
    if stem not in QKV or family.qkv == "separate":
        return Place(tensor, group=weight.shape[0], transposed=transposed)
    group = head_dim if family.qkv == "per_head" else weight.shape[0]
    return Place(tensor, group=group, part=QKV.index(stem), num_parts=len(QKV), transposed=transposed)
