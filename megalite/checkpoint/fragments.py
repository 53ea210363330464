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

from megalite.engine.protocol import Engine
from megalite.engine.slices import Slice, local_slices
from megalite.model.initialize import LocalWeight
from megalite.model.weights import Rectangle
from megalite.parallel.axes import Axes

MAX_SLICES = 64
"""Slices of one weight, under ZeRO-3: more dp ranks than this gather instead."""


@dataclass(frozen=True)
class Part:
    """A rectangle of a canonical weight that this rank writes, with its moments."""

    weight_name: str
    rectangle: Rectangle
    """In the whole weight."""
    tensors: dict[str, Tensor]
    """By kind, fp32, of the rectangle's shape, on the device of training: see `is_live`."""


def owned_parts(engine: Engine, axes: Axes, zero_stage: int) -> Iterator[Part]:
    """Everything this rank writes. The parts of all ranks tile every weight once.

    Collective over dp: all ranks walk it to the end.
    """
    if zero_stage == 0 or not is_live(axes, zero_stage):
        yield from _taking_turns(engine, axes)
        return
    for found in local_slices(engine.stage, zero_stage):
        if _is_ours(found.local, axes):
            yield from _cut(found)


def is_live(axes: Axes, zero_stage: int) -> bool:
    """Whether the parts are views of memory that lasts, not gathered for the moment."""
    return zero_stage < 3 or axes.dp.size <= MAX_SLICES


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


def _taking_turns(engine: Engine, axes: Axes) -> Iterator[Part]:
    """Whole weights, each from one of the dp ranks."""
    for number, state in enumerate(engine.local_weights()):
        if number % axes.dp.size == axes.dp.rank and _is_ours(state.local, axes):
            yield Part(state.local.weight.name, state.local.rectangle, state.tensors)


def _is_ours(local: LocalWeight, axes: Axes) -> bool:
    """Whether this pipeline stage and tp rank writes a weight: replicated weights and tied pairs are written once."""
    is_tied_copy = local.parameter_name == "head.weight" and local.weight.layer == "embedding"
    is_replica = local.weight.cut is None and axes.tp.rank != 0
    is_empty = math.prod(local.rectangle.shape) == 0
    return not (is_tied_copy or is_replica or is_empty)
