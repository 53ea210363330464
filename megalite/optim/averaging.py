"""Averages of weights in place of a schedule (Defazio et al. 2024, "The Road Less Scheduled").

    z    moves as the optimizer says
    x    the mean of all z so far: the model that a run validates, saves for others and exports
    y    (1 - beta) z + beta x: where gradients are taken; what engines update and checkpoints hold as `weight`

State is `z_minus_x`, zero at the start, where all three are one. So x = y - (1 - beta) (z - x), number by number.

A z counts in the mean by the square of the largest rate so far, by which those of a warmup count little. The share of
the newest in all of them, c, follows from the rates of the updates that were made; those that were left out do not
count. It is a few numbers, equal on all ranks, which checkpoints keep (`train.components.adaptive_control`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.config.optimizers import LEAD
from megalite.optim.slices import Slice, chunks

AveragingState = dict[str, list[float]]
"""The largest rate so far, the sum of the squares of the largest rates, and the share of the last: of the run, and by
number of groups that have a schedule of their own."""

RUN = "run"


@dataclass(frozen=True)
class _Mean:
    """The rates of a mean's updates so far."""

    largest: float = 0.0
    total: float = 0.0
    share: float = 1.0
    """Of the newest z in the mean."""

    def after(self, lr: float) -> _Mean:
        largest = max(self.largest, lr)
        total = self.total + largest**2
        return _Mean(largest, total, largest**2 / total if total else 0.0)


class Averaging:
    """What share of the mean each update has, by the schedule that weights follow.

    Factors on a rate that stay as they are, of layers or kinds of weights, cancel out.
    """

    def __init__(self) -> None:
        self._means: dict[str, _Mean] = {RUN: _Mean()}

    def advance(self, lr: float, lr_of_groups: Mapping[int, float]) -> None:
        """An update is being made.

        Args:
            lr: the run's.
            lr_of_groups: of groups that have a schedule of their own. One that had none before goes on from the run's.
        """
        own = {str(number): self._mean(number).after(rate) for number, rate in lr_of_groups.items()}
        self._means = {RUN: self._means[RUN].after(lr), **own}

    def share(self, group: int | None) -> float:
        """Of the newest z in the mean of a group's weights; None for those that follow the run's schedule."""
        return self._mean(group).share

    def state(self) -> AveragingState:
        """All of it, for `load`."""
        return {name: [mean.largest, mean.total, mean.share] for name, mean in self._means.items()}

    def load(self, state: AveragingState) -> None:
        """Go on from a state; an empty one is the beginning."""
        self._means = {RUN: _Mean(), **{name: _Mean(*numbers) for name, numbers in state.items()}}

    def _mean(self, group: int | None) -> _Mean:
        return self._means.get(str(group), self._means[RUN])


def average_of(weight: Tensor, lead: Tensor, beta: float) -> Tensor:
    """x in fp32, given y and z - x."""
    return torch.sub(weight.float(), lead, alpha=1.0 - beta)


@torch.no_grad()
def put_average(part: Slice, beta: float) -> None:
    """Let a slice's weights be x; what is not averaged stays."""
    if LEAD not in part.tensors:
        return
    weight, lead = part.tensors["weight"], part.tensors[LEAD]
    for chunk in chunks(weight):  # of weights in bf16 no more than that is ever there in fp32
        weight[chunk] = average_of(weight[chunk], lead[chunk], beta)
