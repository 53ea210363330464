"""What happens to gradients before the update: centralisation, clipping, noise. In place, the same in every layout.

Clipping by the norm of all gradients is the engines' (`clip_grad_norm`, and the percentile of recent norms); it comes
first. Here is what looks at a part of the gradients:

    value       each number                     magnitude at most `threshold`
    parameter   each canonical weight           L2 norm at most `threshold`
    layer       each block, and each weight     L2 norm at most `threshold`
                outside the blocks
    unit        each row of a matrix, each      L2 norm at most `threshold` times that of the weights: adaptive clipping
                vector                          (Brock et al. 2021, equation 3)

A row or a weight may lie on many ranks. Each rank adds up what it has, and one all-reduce of a number a group makes the
sums whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from torch import Tensor

from megalite.architecture.weights import Weight
from megalite.config.schema import OptimizerConfig
from megalite.config.sections.optimizer import ClipConfig
from megalite.optim.slices import Slice, chunks, places_in_whole
from megalite.parallel.axes import Axis
from megalite.parallel.collectives import all_reduce
from megalite.parallel.random import name_seed, normal

Grouping = Literal["parameter", "layer", "unit"]

UNIT_NORM_FLOOR = 1e-3
"""Adaptive clipping takes weights as at least this long, so that a zero row can learn (Brock et al. 2021)."""


@dataclass(frozen=True)
class _Run:
    """Numbers of a slice that belong to consecutive groups, equally many to each."""

    group: int
    num_groups: int
    start: int
    length: int

    def of(self, tensor: Tensor) -> Tensor:
        """`[num_groups, n]`, a view."""
        return tensor.narrow(0, self.start, self.length).view(self.num_groups, -1)


class Groups:
    """The groups that the weights of a stage fall into, and which of their numbers this rank has.

    Args:
        weights: of the stage, the same list on every rank of the axis.
        slices: this rank's.
        axis: the ranks that share the weights.
        tp_rank: weights that every tp rank has whole count on the first only.
    """

    def __init__(
        self, weights: Sequence[Weight], slices: Sequence[Slice], axis: Axis, tp_rank: int, grouping: Grouping
    ):
        self._axis = axis
        first: dict[str, int] = {}
        size, keys = 0, {}
        for weight in weights:
            key = weight.layer if grouping == "layer" and weight.is_inner else weight.name
            if key not in keys:
                keys[key] = size
                size += weight.shape[0] if grouping == "unit" and len(weight.shape) > 1 else 1
            first[weight.name] = keys[key]
        self.size = size
        self._runs = [list(_runs(part, first[part.local.weight.name], grouping)) for part in slices]
        self._counts = [part.local.weight.cut is not None or tp_rank == 0 for part in slices]

    def sums(self, tensors: Sequence[Tensor], device: torch.device, *, squared: bool) -> Tensor:
        """Sums of all numbers, or of their squares, by group. Collective over the axis.

        Args:
            tensors: one flat tensor for each slice.
        """
        total = torch.zeros(self.size, device=device)
        for tensor, runs, counts in zip(tensors, self._runs, self._counts, strict=True):
            for run in runs if counts else ():
                numbers = run.of(tensor)
                found = numbers.square().sum(dim=1) if squared else numbers.sum(dim=1)
                total.narrow(0, run.group, run.num_groups).add_(found)
        return all_reduce(total, self._axis)

    def views(self, index: int, tensor: Tensor, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The numbers of a slice `[groups, n]`, as views of its tensor, each with its groups' values `[groups, 1]`."""
        for run in self._runs[index]:
            yield run.of(tensor), values.narrow(0, run.group, run.num_groups).unsqueeze(1)


class GradientChanges:
    """All that an optimizer section asks for, over the slices of one rank. Calling it is collective over the axis."""

    def __init__(
        self,
        optimizer: OptimizerConfig,
        weights: Sequence[Weight],
        slices: Sequence[Slice],
        axis: Axis,
        *,
        tp_rank: int,
        seed: int,
        device: torch.device,
    ):
        self._optimizer, self._slices, self._seed, self._device = optimizer, slices, seed, device
        self._centred = Groups(weights, slices, axis, tp_rank, "unit") if optimizer.centralize else None
        clip = optimizer.clip
        self._clipped: tuple[Groups, ClipConfig] | None = None
        if clip is not None and clip.by in ("parameter", "layer", "unit"):
            self._clipped = Groups(weights, slices, axis, tp_rank, clip.by), clip
        self._largest = clip.threshold if clip is not None and clip.by == "value" else None
        self.are_any = any((self._centred, self._clipped, self._largest is not None, optimizer.noise))
        """Whether anything is asked for."""

    def apply(self, gradients: Sequence[Tensor], step: int) -> None:
        """Change the gradients of all slices, fp32, in place; steps count from 1."""
        if self._centred is not None:
            self._centralize(self._centred, gradients)
        if self._clipped is not None:
            self._clip_groups(*self._clipped, gradients)
        if self._largest is not None:
            for gradient in gradients:
                gradient.clamp_(-self._largest, self._largest)
        if self._optimizer.noise:
            self._add_noise(gradients, step)

    def _centralize(self, groups: Groups, gradients: Sequence[Tensor]) -> None:
        """Take the mean of each row off the matrices of blocks (Yong et al. 2020)."""
        sums = groups.sums(gradients, self._device, squared=False)
        for index, (part, gradient) in enumerate(zip(self._slices, gradients, strict=True)):
            weight = part.local.weight
            if len(weight.shape) > 1 and weight.is_inner:
                for numbers, total in groups.views(index, gradient, sums):
                    numbers.sub_(total / prod(weight.shape[1:]))

    def _clip_groups(self, groups: Groups, clip: ClipConfig, gradients: Sequence[Tensor]) -> None:
        norms = groups.sums(gradients, self._device, squared=True).sqrt_()
        bounds = torch.full_like(norms, clip.threshold)
        if clip.by == "unit":
            weights = [part.tensors["weight"] for part in self._slices]
            bounds *= groups.sums(weights, self._device, squared=True).sqrt_().clamp_(min=UNIT_NORM_FLOOR)
        factors = (bounds / norms.clamp_(min=1e-6)).clamp_(max=1.0)
        for index, gradient in enumerate(gradients):
            for numbers, factor in groups.views(index, gradient, factors):
                numbers.mul_(factor)

    def _add_noise(self, gradients: Sequence[Tensor], step: int) -> None:
        """Normal noise of variance noise / (1 + step)^noise_decay (Neelakantan et al. 2015, equation 1)."""
        deviation = (self._optimizer.noise / (1 + step) ** self._optimizer.noise_decay) ** 0.5
        for part, gradient in zip(self._slices, gradients, strict=True):
            seed = name_seed(self._seed, f"gradient noise/{part.local.weight.name}/{step}")
            for chunk in chunks(gradient):
                places = places_in_whole(part, chunk, gradient.device)
                gradient[chunk].add_(normal(places, seed), alpha=deviation)


def _runs(part: Slice, first: int, grouping: Grouping) -> Iterator[_Run]:
    """The groups of a slice's numbers: one, or for rows the end of one, whole ones, and the beginning of one."""
    length = part.stop - part.start
    if grouping != "unit" or len(part.local.rectangle.shape) == 1:
        yield _Run(first, 1, 0, length)
        return
    row_size = prod(part.local.rectangle.shape[1:])
    first += part.local.rectangle.start[0]
    begin, whole = -(-part.start // row_size), part.stop // row_size
    if part.start < begin * row_size:
        yield _Run(first + begin - 1, 1, 0, min(begin * row_size - part.start, length))
    if begin < whole:
        yield _Run(first + begin, whole - begin, begin * row_size - part.start, (whole - begin) * row_size)
    if begin <= whole and whole * row_size < part.stop:
        yield _Run(first + whole, 1, whole * row_size - part.start, part.stop - whole * row_size)
