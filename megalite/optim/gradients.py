"""What happens to gradients before the update: centralisation, clipping, noise. In place, the same in every layout.

Clipping by the norm of all gradients is the engines' (`clip_grad_norm`, and the percentile of recent norms); it comes
first. Here is what looks at a part of the gradients:

    value       each number                     magnitude at most `threshold`
    parameter   each canonical weight           L2 norm at most `threshold`
    layer       each block, and each weight     L2 norm at most `threshold`
                outside the blocks
    group       all that one of the section's   L2 norm at most `threshold`
                groups has, and all that none
                has
    unit        each row of a matrix, each      L2 norm at most `threshold` times that of the weights: adaptive clipping
                vector                          (Brock et al. 2021, equation 3)

The weights of a group may have a threshold of their own; where they share a block with others they are then clipped
apart from these. A row or a weight may lie on many ranks. Each rank adds up what it has, and one all-reduce of a number
a group makes the sums whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor

from megalite.architecture.weights import Weight
from megalite.config.schema import OptimizerConfig
from megalite.config.weight_groups import group_number, group_of
from megalite.optim.slices import Slice, chunks, places_in_whole
from megalite.parallel.axes import Axis
from megalite.parallel.collectives import all_reduce
from megalite.parallel.random import name_seed, normal

KeyOf = Callable[[Weight], Hashable]
"""What weights that are taken together have in common."""

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
        counted: for each slice, whether this rank counts it: no number is to count twice along the axis.
        key_of: weights with one key are one group.
        keys: what keys there are, in order, where a stage does not have all of them; they are found in the weights.
        by_row: each row of a matrix is a group; keys are then of one weight each.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        slices: Sequence[Slice],
        axis: Axis,
        counted: Sequence[bool],
        *,
        key_of: KeyOf,
        keys: Sequence[Hashable] = (),
        by_row: bool = False,
    ):
        self._axis = axis
        first: dict[str, int] = {}
        size, places = len(keys), {key: place for place, key in enumerate(keys)}
        for weight in weights:
            key = key_of(weight)
            if key not in places:
                places[key] = size
                size += weight.shape[0] if by_row and len(weight.shape) > 1 else 1
            first[weight.name] = places[key]
        self.size, self.first = size, first
        """How many there are, and the first one of each weight."""
        self._runs = [list(_runs(part, first[part.local.weight.name], by_row=by_row)) for part in slices]
        self._counted = list(counted)

    def sums(self, tensors: Sequence[Tensor], device: torch.device, *, squared: bool) -> Tensor:
        """Sums of all numbers, or of their squares, by group. Collective over the axis.

        Args:
            tensors: one flat tensor for each slice.
        """
        total = torch.zeros(self.size, device=device)
        for tensor, runs, counts in zip(tensors, self._runs, self._counted, strict=True):
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
    """All that an optimizer section asks for, over the slices of one rank. Calling it is collective.

    Args:
        weights: of the stage, the same list on every rank of the axis.
        slices: this rank's.
        axis: the ranks that share the weights.
        world: all ranks of the run, which have other stages too.
        tp_rank: weights that every tp rank has whole count on the first only.
        seed: of the noise.
    """

    def __init__(
        self,
        optimizer: OptimizerConfig,
        weights: Sequence[Weight],
        slices: Sequence[Slice],
        axis: Axis,
        *,
        world: Axis,
        tp_rank: int,
        seed: int,
        device: torch.device,
    ):
        self._optimizer, self._slices, self._seed, self._device = optimizer, slices, seed, device
        clip = optimizer.clip
        by = None if clip is None else clip.by
        counted = [part.local.weight.cut is not None or tp_rank == 0 for part in slices]
        by_row = partial(Groups, weights, slices, axis, counted, key_of=_name, by_row=True)
        together = partial(Groups, weights, slices, axis, counted)
        self._centred = by_row() if optimizer.centralize else None
        self._clipped: Groups | None = None
        if by == "unit":
            self._clipped = by_row()
        elif by == "parameter":
            self._clipped = together(key_of=_name)
        elif by == "layer":
            self._clipped = together(key_of=lambda weight: _layer(weight, optimizer))
        elif by == "group":
            everywhere = [not part.is_copy for part in slices]
            keys = [None, *range(len(optimizer.groups))]
            key_of = partial(_group, optimizer=optimizer)
            self._clipped = Groups(weights, slices, world, everywhere, key_of=key_of, keys=keys)
        self._thresholds = {weight.name: _threshold(weight, optimizer) for weight in weights}
        self._bounds: Tensor | None = None
        if self._clipped is not None:
            self._bounds = _bounds(weights, self._clipped, self._thresholds, by_row=by == "unit").to(device)
        self._clips_numbers = by == "value"
        self.are_any = any((self._centred, self._clipped, self._clips_numbers, optimizer.noise))
        """Whether anything is asked for."""

    def apply(self, gradients: Sequence[Tensor], step: int) -> None:
        """Change the gradients of all slices, fp32, in place; steps count from 1."""
        if self._centred is not None:
            self._centralize(self._centred, gradients)
        if self._clipped is not None and self._bounds is not None:
            self._clip_groups(self._clipped, self._bounds, gradients)
        if self._clips_numbers:
            for part, gradient in zip(self._slices, gradients, strict=True):
                largest = self._thresholds[part.local.weight.name]
                gradient.clamp_(-largest, largest)
        if self._optimizer.noise:
            self._add_noise(gradients, step)

    def _centralize(self, groups: Groups, gradients: Sequence[Tensor]) -> None:
        """Take the mean of each row off the matrices of blocks (Yong et al. 2020)."""
        sums = groups.sums(gradients, self._device, squared=False)
        for index, (part, gradient) in enumerate(zip(self._slices, gradients, strict=True)):
            weight = part.local.weight
            if weight.is_matrix and weight.is_inner:
                for numbers, total in groups.views(index, gradient, sums):
                    numbers.sub_(total / prod(weight.shape[1:]))

    def _clip_groups(self, groups: Groups, bounds: Tensor, gradients: Sequence[Tensor]) -> None:
        norms = groups.sums(gradients, self._device, squared=True).sqrt_()
        if self._optimizer.clip is not None and self._optimizer.clip.by == "unit":
            weights = [part.tensors["weight"] for part in self._slices]
            of_weights = groups.sums(weights, self._device, squared=True).sqrt_().clamp_(min=UNIT_NORM_FLOOR)
            bounds = bounds * of_weights
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


def _name(weight: Weight) -> str:
    return weight.name


def _group(weight: Weight, optimizer: OptimizerConfig) -> Hashable:
    return group_number(weight.name, optimizer)


def _layer(weight: Weight, optimizer: OptimizerConfig) -> Hashable:
    """A block, or a weight outside; what has a threshold of its own there is apart."""
    group = group_number(weight.name, optimizer)
    has_own = group is not None and optimizer.groups[group].clip_threshold is not None
    return weight.layer if weight.is_inner else weight.name, group if has_own else None


def _threshold(weight: Weight, optimizer: OptimizerConfig) -> float:
    if optimizer.clip is None:
        return math.inf
    own = group.clip_threshold if (group := group_of(weight.name, optimizer)) is not None else None
    return optimizer.clip.threshold if own is None else own


def _bounds(weights: Sequence[Weight], groups: Groups, thresholds: dict[str, float], *, by_row: bool) -> Tensor:
    """The threshold of each group, [groups] fp32."""
    bounds = torch.zeros(groups.size)
    for weight in weights:
        first, count = groups.first[weight.name], weight.shape[0] if by_row and len(weight.shape) > 1 else 1
        bounds[first : first + count] = thresholds[weight.name]
    return bounds


def _runs(part: Slice, first: int, *, by_row: bool) -> Iterator[_Run]:
    """The groups of a slice's numbers: one, or for rows the end of one, whole ones, and the beginning of one."""
    length = part.stop - part.start
    if not by_row or len(part.local.rectangle.shape) == 1:
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
