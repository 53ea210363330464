"""Who owns which rectangle: the numbers that a rank keeps, cut into rectangles of canonical weights.

A rank often keeps a slice of the flattened weights. A slice of a matrix, read row by row, is at most three rectangles,
and a checkpoint is made of rectangles, so every rank can write just what it owns, and nothing is gathered:

    . . . . # #     the end of a row
    # # # # # #     whole rows
    # # . . . .     the beginning of a row
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from megalite.architecture.weights import Rectangle
from megalite.optim.slices import Slice


@dataclass(frozen=True)
class Part:
    """A rectangle of a canonical weight that this rank owns, with its optimizer state, or state alone."""

    weight_name: str
    rectangle: Rectangle
    """In the whole weight, or in the whole tensor of a state that has another shape."""
    tensors: dict[str, Tensor]
    """By kind, fp32, of the rectangle's shape, on the device of training."""
    is_live: bool = True
    """The tensors are views of memory that lasts, not made for the moment."""


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


def parts_of_slice(found: Slice) -> Iterator[Part]:
    """A slice as rectangles."""
    local, done = found.local, 0
    for part in rectangles_of_slice(local.rectangle.shape, found.start, found.stop):
        count = math.prod(part.shape)
        views = {kind: tensor.narrow(0, done, count).view(part.shape) for kind, tensor in found.tensors.items()}
        corner = tuple(a + b for a, b in zip(local.rectangle.start, part.start, strict=True))
        yield Part(local.weight.name, Rectangle(corner, part.shape), views)
        done += count
