"""The numbers that an optimizer updates on this rank: parts of canonical weights, as views of live memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from megalite.model.initialize import LocalWeight
from megalite.optim.at_work import AT_ONCE, CHUNK

Part = TypeVar("Part")


@dataclass(frozen=True)
class Slice:
    """Consecutive numbers of a weight's local part, read row by row."""

    local: LocalWeight
    start: int
    """The first number, counted in the flattened local part."""
    tensors: dict[str, Tensor]
    """`weight`, and once an optimizer is bound its state by kind: flat, the memory that it works on. fp32, but for
    weights that live in bf16."""
    is_copy: bool = False
    """Another rank has the same numbers, and stands for them where each counts once."""

    @property
    def stop(self) -> int:
        """One past the last number."""
        return self.start + self.tensors["weight"].numel()


def chunks(tensor: Tensor) -> Iterator[slice]:
    """Cut a flat tensor for work with large intermediate results."""
    return pieces(tensor.numel(), CHUNK[tensor.device.type])


def pieces(num: int, size: int) -> Iterator[slice]:
    """Cut so many numbers in runs of at most `size`."""
    return (slice(start, min(start + size, num)) for start in range(0, num, size))


def batches(parts: Sequence[Part], size: Callable[[Part], int]) -> Iterator[list[Part]]:
    """Consecutive parts with up to `AT_ONCE` numbers together, or one that has more."""
    batch, filled = list[Part](), 0
    for part in parts:
        if batch and filled + size(part) > AT_ONCE:
            yield batch
            batch, filled = [], 0
        batch.append(part)
        filled += size(part)
    if batch:
        yield batch


def places_in_whole(part: Slice, chunk: slice, device: torch.device) -> Tensor:
    """The places of a chunk of a slice's numbers in its whole weight, read row by row: int64."""
    rectangle, weight = part.local.rectangle, part.local.weight
    places = torch.arange(part.start + chunk.start, part.start + chunk.stop, device=device)
    if len(weight.shape) == 1:
        return places + rectangle.start[0]
    row_size = math.prod(rectangle.shape[1:])
    if row_size == weight.shape[1]:
        return places + rectangle.start[0] * row_size
    rows, columns = places // row_size + rectangle.start[0], places % row_size + rectangle.start[1]
    return rows * weight.shape[1] + columns


def copy_numbers(target: Tensor, source: Tensor) -> None:
    """Copy numbers into a tensor of the same shape; fp32 ones on the CPU with the calling thread alone.

    Torch would share the work out to a team of OpenMP threads, which gains little, memory being the limit, and waits
    at every tensor for the slowest: beside training, or other processes, that takes up to ten times as long.
    """
    if target.device.type == source.device.type == "cpu" and target.dtype == source.dtype == torch.float32:
        np.copyto(target.detach().numpy(), source.detach().numpy())
    else:
        target.copy_(source, non_blocking=True)
