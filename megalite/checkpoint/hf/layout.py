"""Where canonical weights lie in a tensor of transformers: alone, fused with others, or transposed.

One formula covers all of them. Rows of the parts, which need not be equally large, are dealt out in equal groups:

    group 0 of part 0 | group 0 of part 1 | ... | group 1 of part 0 | ...

    alone                  one part
    GPT-2's c_attn         q, k, v in one group:                 q | k | v
    Phi-3's gate_up_proj   gate, up in one group:                gate | up
    GPT-NeoX's fused qkv   q, k, v; a group for each head:       q0 k0 v0 | q1 k1 v1 | ...
    with grouped queries   a group for each key and value head:  q0 q1 k0 v0 | q2 q3 k1 v1 | ...

A transposed tensor (GPT-2's Conv1D) is stored with its dims swapped after that. Where all experts of a block are one
tensor (gpt-oss), it has a dim more in front, of one such matrix an expert.

Weights are read, converted and compared in blocks of rows, so that memory does not grow with them. Only where a weight
lies across its tensor (transposed) is a tensor taken as one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from megalite.architecture.architecture import Architecture
from megalite.architecture.weights import Rectangle, Weight, stored_table
from megalite.checkpoint.hf.family import Family

BLOCK_BYTES = 2 * 2**20
"""Of fp32 in memory at a time: large against the cost of a call, small enough for a core's own cache."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a Hugging Face folder, and the weights that it is made of."""

    name: str
    weights: tuple[Weight, ...]
    """Its parts in order, which differ in nothing but their rows."""
    num_groups: int = 1
    """In which the rows of each part are dealt out."""
    transposed: bool = False
    num_stacked: int | None = None
    """Equal matrices of which it is a stack, each of as many of the parts; None where it is no stack."""

    @cached_property
    def layers(self) -> list[StoredTensor]:
        """The matrices of a stack."""
        size = len(self.weights) // (self.num_stacked or 1)
        starts = range(0, len(self.weights), size)
        return [replace(self, weights=self.weights[start : start + size], num_stacked=None) for start in starts]

    @property
    def num_elements(self) -> int:
        return sum(prod(weight.shape) for weight in self.weights)

    @property
    def is_state(self) -> bool:
        """Whether it stays in fp32, whatever the weights are written in."""
        return self.weights[0].state is not None

    @cached_property
    def shape(self) -> tuple[int, ...]:
        if self.num_stacked is not None:
            return (self.num_stacked, *self.layers[0].shape)
        rows = sum(weight.shape[0] for weight in self.weights)
        stored = (rows, *self.weights[0].shape[1:])
        return stored[::-1] if self.transposed else stored

    def blocks(self) -> Iterator[list[tuple[Weight, Rectangle]]]:
        """Blocks of the tensor from its first row to its last: what each is joined of."""
        if self.num_stacked is not None:
            yield from (block for layer in self.layers for block in layer.blocks())
        elif self.transposed:
            yield [(weight, _rows(weight, 0, weight.shape[0])) for weight in self.weights]
        elif self.num_groups == 1:
            for weight in self.weights:
                yield from ([(weight, rectangle)] for rectangle in row_blocks(weight.shape))
        else:
            for groups in row_blocks((self.num_groups, self.num_elements // self.num_groups)):
                first, count = groups.start[0], groups.shape[0]
                sizes = [weight.shape[0] // self.num_groups for weight in self.weights]
                pairs = zip(self.weights, sizes, strict=True)
                yield [(weight, _rows(weight, first * size, count * size)) for weight, size in pairs]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """A block of the tensor, of what `blocks` asks for."""
        stored = parts[0]
        if len(parts) > 1:
            num_groups = stored.shape[0] * self.num_groups // self.weights[0].shape[0]
            grouped = [part.unflatten(0, (num_groups, -1)) for part in parts]
            stored = torch.cat(grouped, dim=1).flatten(0, 1)
        return (stored.t() if self.transposed else stored).contiguous()

    def place(self, part: int) -> TensorPlace:
        """The place of one of its weights."""
        if self.num_stacked is not None:
            index, part = divmod(part, len(self.weights) // self.num_stacked)
            return replace(self.layers[index].place(part), shape=self.shape, index=index)
        sizes = [weight.shape[0] // self.num_groups for weight in self.weights]
        return TensorPlace(self.name, self.shape, sizes[part], sum(sizes[:part]), sum(sizes), self.transposed)


@dataclass(frozen=True)
class TensorPlace:
    """The place of one canonical weight."""

    tensor: str
    """Name of the tensor in the Hugging Face folder."""
    shape: tuple[int, ...]
    """Of that tensor, as it is stored."""
    group: int
    """Rows of the weight that lie together."""
    offset: int
    """Rows of other weights before them, in a group."""
    period: int
    """Rows of a group."""
    transposed: bool
    index: int | None = None
    """Of the matrix that it is in, in a stack."""

    def renamed(self, tensor: str) -> TensorPlace:
        """The same place in a tensor of another name."""
        return replace(self, tensor=tensor)

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Where rows `start` to `stop` of the weight begin in the tensor: (row there, number of rows) for each run."""
        while start < stop:
            index, within = divmod(start, self.group)
            size = min(stop - start, self.group - within)
            yield index * self.period + self.offset + within, size
            start += size


def _rows(weight: Weight, start: int, count: int) -> Rectangle:
    """Some rows of a weight, whole ones."""
    return Rectangle((start, *(0 for _ in weight.shape[1:])), (count, *weight.shape[1:]))


def row_blocks(shape: tuple[int, ...]) -> Iterator[Rectangle]:
    """Cut a weight of this shape into runs of rows of about BLOCK_BYTES."""
    row_bytes = prod(shape[1:]) * torch.float32.itemsize
    num_rows = max(1, BLOCK_BYTES // row_bytes)
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


def stored_tensors(model: Architecture, family: Family) -> list[StoredTensor]:
    """The tensors of a family for a filled model, sorted by name; weights of one name are fused."""
    parts: dict[str, list[Weight]] = {}
    for weight in stored_table(model).values():
        parts.setdefault(_tensor_name(weight, family, model.num_layers), []).append(weight)
    return [_stored(name, weights, model, family) for name, weights in sorted(parts.items())]


def places(model: Architecture, family: Family) -> dict[str, TensorPlace]:
    """The place of every canonical weight of a filled model, by canonical name."""
    return {
        weight.name: tensor.place(part)
        for tensor in stored_tensors(model, family)
        for part, weight in enumerate(tensor.weights)
    }


def _tensor_name(weight: Weight, family: Family, num_layers: int) -> str:
    if weight.name in family.outer:
        return family.outer[weight.name]
    index, stem, kind = _inside(weight)
    if weight.layer.startswith("mtp."):
        index = str(num_layers + int(index))
    if stem in family.predicting:
        return f"{family.blocks}.{index}.{family.predicting[stem]}.{kind}"
    if weight.state is not None:
        return f"{family.blocks}.{index}.{family.inner[f'{stem}.{kind}']}"
    theirs = family.inner[stem]
    if weight.expert is not None and "*" not in theirs:  # a stack, which is a parameter itself
        return f"{family.blocks}.{index}.{theirs}{'_bias' if kind == 'bias' else ''}"
    if weight.expert is not None:
        theirs = theirs.replace("*", str(weight.expert[0]))
    return f"{family.blocks}.{index}.{theirs}.{kind}"


def _stored(name: str, weights: list[Weight], model: Architecture, family: Family) -> StoredTensor:
    if weights[0].name in family.outer or _inside(weights[0])[1] in family.predicting:
        return StoredTensor(name, tuple(weights))
    order = list(family.inner)
    weights = sorted(weights, key=lambda weight: (weight.expert or (0, 0), order.index(_inside(weight)[1])))
    stem = _inside(weights[0])[1]
    if weights[0].expert is not None and "*" not in family.inner[stem]:
        count = weights[0].expert[1]
        is_matrix = len(weights[0].shape) == 2
        is_fused = len(weights) > count
        groups = weights[0].shape[0] if is_fused and family.experts_by_row else 1
        return StoredTensor(name, tuple(weights), groups, family.transposed_experts and is_matrix, count)
    num_groups = model.num_kv_heads if family.inner[stem] in family.fused_by_head else 1
    return StoredTensor(name, tuple(weights), num_groups, family.transposed and len(weights[0].shape) == 2)


def _inside(weight: Weight) -> tuple[str, str, str]:
    """The index of a weight's block, its name in there, `*` for an expert's number, and whether it is `weight` or
    `bias`. Layers that predict further have an index of their own, and their block's names are those of others."""
    _, index, inner = weight.name.split(".", 2)
    inner = inner.removeprefix("block.")
    stem, kind = inner.rsplit(".", 1)
    if weight.expert is not None:
        stem = stem.replace(f".{weight.expert[0]}.", ".*.", 1)
    return index, stem, kind
