"""The part of the model that each rank writes: where its numbers lie, cut into rectangles, without any communication.

ZeRO keeps a slice of the flattened weights on each dp rank. A slice of a matrix, read row by row, is at most three
rectangles, and a checkpoint is made of rectangles, so every rank can write just what it owns:

    . . . . # #     the end of a row
    # # # # # #     whole rows
    # # . . . .     the beginning of a row

Nothing is gathered, no rank holds more than its share, and the work is divided evenly. Without ZeRO every dp rank has
everything, and they take turns, weight by weight. So they do under ZeRO-3 on very many ranks, where every single weight
is cut into as many slices as there are ranks and a manifest would be full of crumbs: there DeepSpeed gathers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from megalite.checkpoint.stage_state import owned_state
from megalite.engine.protocol import Engine
from megalite.model.initialize import LocalWeight
from megalite.model.weights import Rectangle
from megalite.optim.optimizer import OwnedState
from megalite.optim.slices import Slice
from megalite.parallel.axes import Axes

MAX_SLICES = 64
"""Slices of one weight, under ZeRO-3: more dp ranks than this gather instead."""


@dataclass(frozen=True)
class Part:
    """A rectangle of a canonical weight that this rank writes, with its optimizer state, or state alone."""

    weight_name: str
    rectangle: Rectangle
    """In the whole weight, or in the whole tensor of a state that has another shape."""
    tensors: dict[str, Tensor]
    """By kind, fp32, of the rectangle's shape, on the device of training."""
    is_live: bool = True
    """The tensors are views of memory that lasts, not made for the moment."""


def owned_parts(engine: Engine, axes: Axes, zero_stage: int) -> Iterator[Part]:
    """Everything this rank writes. The parts of all ranks tile every weight once.

    Collective over dp: all ranks walk it to the end.
    """
    for kind, name, tensor in owned_state(engine, axes):
        yield Part(name, Rectangle((0,) * tensor.dim(), tuple(tensor.shape)), {kind: tensor}, is_live=False)
    if zero_stage == 0 or (zero_stage == 3 and axes.dp.size > MAX_SLICES):
        yield from _taking_turns(engine, axes, is_live=zero_stage == 0)
    else:
        for found in engine.slices():
            if _is_ours(found.local, axes):
                yield from _cut(found)
    for state in engine.owned_states():
        if _is_ours_to_write(state, axes, zero_stage):
            for kind, (rectangle, tensor) in state.tensors.items():
                yield Part(state.unit.weight.name, rectangle, {kind: tensor}, state.is_live)


def rectangles_of_slice(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Rectangle]:
    """The rectangles that make up numbers start..stop-1 of a row-major array, in order."""
    start, stop = max(0, start), min(stop, math.prod(shape))
    if start >= stop:
        return
    if len(shape) == 1:
        yield Rectangle((start,), (stop - start,))
        return
    row_shape = shape[1:]
    row_size = math.prod(row_shape)
    first, last = -(-start // row_size), stop // row_size  # the whole rows
    if start < first * row_size:
        yield from _in_row(first - 1, row_shape, start, min(stop, first * row_size))
    if first < last:
        yield Rectangle((first, *(0 for _ in row_shape)), (last - first, *row_shape))
    if first <= last and last * row_size < stop:
        yield from _in_row(last, row_shape, last * row_size, stop)


def _in_row(row: int, row_shape: tuple[int, ...], start: int, stop: int) -> Iterator[Rectangle]:
    offset = row * math.prod(row_shape)
    for part in rectangles_of_slice(row_shape, start - offset, stop - offset):
        yield Rectangle((row, *part.start), (1, *part.shape))


def _cut(found: Slice) -> Iterator[Part]:
    """A slice as rectangles."""
    local, done = found.local, 0
    for part in rectangles_of_slice(local.rectangle.shape, found.start, found.stop):
        count = math.prod(part.shape)
        views = {kind: tensor.narrow(0, done, count).view(part.shape) for kind, tensor in found.tensors.items()}
        corner = tuple(a + b for a, b in zip(local.rectangle.start, part.start, strict=True))
        yield Part(local.weight.name, Rectangle(corner, part.shape), views)
        done += count


def _taking_turns(engine: Engine, axes: Axes, *, is_live: bool) -> Iterator[Part]:
    """Whole weights, each from one of the dp ranks."""
    for number, state in enumerate(engine.local_weights()):
        if number % axes.dp.size == axes.dp.rank and _is_ours(state.local, axes):
            yield Part(state.local.weight.name, state.local.rectangle, state.tensors, is_live)


def _is_ours(local: LocalWeight, axes: Axes) -> bool:
    """Whether this pipeline stage and tp rank writes a weight: replicated weights and tied pairs are written once."""
    is_tied_copy = local.parameter_name == "head.weight" and local.weight.layer == "embedding"
    is_replica = local.weight.cut is None and axes.tp.rank != 0
    is_empty = math.prod(local.rectangle.shape) == 0
    return not (is_tied_copy or is_replica or is_empty)


def _is_ours_to_write(state: OwnedState, axes: Axes, zero_stage: int) -> bool:
    """The same of state that this rank keeps whole: the other copies are those of dp ranks without ZeRO."""
    is_tied_copy = axes.pp.rank > 0 and state.unit.weight.layer == "embedding"
    is_copy = zero_stage == 0 and axes.dp.rank != 0
    return not (is_tied_copy or is_copy or state.unit.replica != 0)
