"""Softmax over a rank's columns of some tokens' logits, and the loss's gradient in their place.

    maximum, total, target   [c] each: the largest logit, the sum of exponentials of the logits less it, the label's
    gradient                 exp(logit - maximum) scale - one-hot w, times the slope of the bound if there is one

Two ways to the same numbers. Spelled out, torch's softmax does it in place in at least fp32: on a CPU, where the rows
at hand fit into its caches. On a GPU with Triton one kernel reads the logits once for all three figures, and one turns
them into their gradient: 6 bytes a logit in bf16, beside the 6 of the products that make and use them, where operation
by operation they are 40, and took what 55 take on a H200.

Legend: c tokens, v columns; labels are columns of this rank, any other number being a label that is elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megalite.layers.own_kernels import takes_own_kernels


@dataclass(frozen=True)
class OwnColumns:
    """Of a rank's columns, `[c]` each, at least fp32."""

    maximum: Tensor
    total: Tensor
    """Sum of exponentials of the logits less the maximum."""
    target: Tensor
    """The label's logit less the maximum; anything where the label is elsewhere."""
    here: Tensor
    """Whether the label is among these columns."""


class Columns(Protocol):
    """A rank's logits of some tokens, `[c, v]`; those who measure them spoil them."""

    def measure(self) -> OwnColumns:
        """What their softmax is made of; once."""
        ...

    def put_gradient(self, scale: Tensor, weights: Tensor) -> None:
        """In place of the logits `exp(logit - maximum) scale - one-hot weights`; both are `[c]`."""
        ...


def columns_of(logits: Tensor, labels: Tensor, soft_cap: float | None) -> Columns:
    """The way that is quickest here.

    Args:
        soft_cap: bound of the logits, which have not been bounded yet; None for none.
    """
    if logits.shape[1] and logits.stride(1) == 1 and takes_own_kernels(logits):
        return KernelColumns(logits, labels, soft_cap)
    return SpelledOutColumns(logits, labels, soft_cap)


class SpelledOutColumns:
    """By torch's own operations."""

    def __init__(self, logits: Tensor, labels: Tensor, soft_cap: float | None):
        self._logits = logits
        self.wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        """Bounded logits, the very ones where they are wide."""
        self._slope = None if soft_cap is None else _bound(self.wide, soft_cap)
        self._here = (labels >= 0) & (labels < logits.shape[1])
        self._columns = torch.where(self._here, labels, 0).unsqueeze(1)
        self._unit: Tensor | None = None

    def measure(self) -> OwnColumns:
        """By torch's kernel, which passes over a row while it is at hand.

        Its exponentials follow from the largest entry, which stands for 1. What it has added them up to is too coarse
        where there are 100,000: so they are added up once more.
        """
        if not self.wide.shape[1]:
            none = self.wide.sum(dim=1)
            return OwnColumns(torch.full_like(none, float("-inf")), none, none, self._here)
        maximum = self.wide.amax(dim=1)
        target = self.wide.gather(1, self._columns).squeeze(1) - maximum
        torch.softmax(self.wide, 1, out=self.wide)
        self._unit = 1.0 / self.wide.amax(dim=1)
        return OwnColumns(maximum, self.wide.sum(dim=1) * self._unit, target, self._here)

    def put_gradient(self, scale: Tensor, weights: Tensor) -> None:
        """As the protocol says."""
        if not self.wide.shape[1]:
            return
        assert self._unit is not None, "measured first"
        self.wide.mul_((scale * self._unit).unsqueeze(1))
        with _one_place_a_row():
            self.wide.scatter_add_(1, self._columns, -(weights * self._here).to(self.wide.dtype).unsqueeze(1))
        self.put(self.wide)

    def put(self, grad: Tensor) -> None:
        """A gradient of the bounded logits, as one of the logits, in their place."""
        grad = grad if self._slope is None else grad.mul_(self._slope)
        if grad is not self._logits:
            self._logits.copy_(grad)


class KernelColumns:
    """By kernels in Triton."""

    def __init__(self, logits: Tensor, labels: Tensor, soft_cap: float | None):
        self._logits, self._labels, self._soft_cap = logits, labels.contiguous(), soft_cap
        self._maximum: Tensor | None = None

    def measure(self) -> OwnColumns:
        """By one pass."""
        from megalite.layers.triton_kernels import launch_row_softmax

        self._maximum, total, target = launch_row_softmax(self._logits, self._labels, self._soft_cap)
        return OwnColumns(self._maximum, total, target, (self._labels >= 0) & (self._labels < self._logits.shape[1]))

    def put_gradient(self, scale: Tensor, weights: Tensor) -> None:
        """As the protocol says."""
        from megalite.layers.triton_kernels import launch_logits_gradient

        assert self._maximum is not None, "measured first"
        rows = self._maximum, scale.contiguous(), weights.contiguous()
        launch_logits_gradient(self._logits, self._labels, rows, self._soft_cap)


def _bound(logits: Tensor, soft_cap: float) -> Tensor:
    """Turn logits `[c, v]` into `soft_cap x tanh(logits / soft_cap)` in place; returns the slope there."""
    bounded = logits.div_(soft_cap).tanh_()
    slope = 1.0 - bounded.square()
    bounded.mul_(soft_cap)
    return slope


@contextmanager
def _one_place_a_row() -> Iterator[None]:
    """Scatter as fast as it goes though algorithms are to be deterministic: every row is added to in one place, so no
    order matters. Torch's deterministic form on a GPU sorts the places, and waits for the device."""
    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("default")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
