"""What rules have in common that work on whole weights, or whole rows, brought together by an `Exchange`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from megalite.architecture.weights import Rectangle, Weight
from megalite.optim.exchange import Unit

Placed = dict[str, tuple[Rectangle, Tensor]]
"""Tensors by kind of state, each with its place in the whole tensor of that kind."""


def all_of(tensor: Tensor) -> Rectangle:
    """The place of a tensor that is the whole."""
    return Rectangle((0,) * tensor.dim(), tuple(tensor.shape))


class WholeRule(ABC):
    """Turns gradients into directions, unit by unit; the weights then shrink and move against them."""

    wire_dtype = torch.float32
    """Format in which units travel."""
    is_state_live = True
    """Whether `state` returns the memory that is worked on, not something made for the moment."""

    def rows_of_units(self, weight: Weight) -> list[tuple[int, int]]:
        """The runs of rows that are units: all in one."""
        return [(0, weight.shape[0])]

    def cost(self, unit: Unit) -> float:
        """The work of a unit, in any measure."""
        return float(prod(unit.shape))

    def outgoing(self, gradients: list[Tensor], states: dict[str, list[Tensor]]) -> list[Tensor]:
        """What travels: the gradients, or what elementwise state makes of them."""
        return gradients

    def incoming(self, weight: Weight, direction: Tensor) -> Tensor:
        """The direction of a slice, made of what came back."""
        return direction

    @abstractmethod
    def start(self, unit: Unit, device: torch.device) -> None:
        """Make the zero state of a unit that this rank owns."""

    @abstractmethod
    def direction(self, unit: Unit, whole: Tensor, step: int) -> Tensor:
        """The direction of a unit, of its shape; changes its state, and not `whole`. Steps count from 1."""

    @abstractmethod
    def state(self, unit: Unit) -> Placed:
        """The state of a unit as checkpoints hold it, fp32."""

    @abstractmethod
    def load(self, unit: Unit, read: Callable[[str, Rectangle, tuple[int, ...]], Tensor]) -> None:
        """Set the state of a unit; `read` yields a rectangle of a kind, given that kind's whole shape."""
