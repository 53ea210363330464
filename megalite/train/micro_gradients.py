"""Squared gradient norms of single micro-batches, which an engine only ever hands out summed up.

Each weight counts on one rank of a model replica. The engine tells its gradients in steps that are measured only, so
others cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from megalite.data.loader import Batch
from megalite.engine.grad_norm import counts_here
from megalite.engine.protocol import Engine, StepResult
from megalite.engine.steps import loss_weights
from megalite.optim.noise_scale import Squares
from megalite.parallel.axes import Axes
from megalite.parallel.collectives import all_reduce


class MicroGradients:
    """Measures one step at a time: `start`, the step, `finish`."""

    def __init__(self, engine: Engine, axes: Axes):
        self._engine, self._axes = engine, axes
        self._counted = {parameter for parameter in engine.stage.parameters() if counts_here(parameter, axes)}
        self._squares: list[tuple[int, Tensor]] = []
        self._loss_scale = 1.0
        self._end: Callable[[], None] | None = None

    def start(self, loss_scale: float = 1.0) -> None:
        """Begin to listen to a step whose loss is scaled so."""
        self._loss_scale, self._squares = loss_scale, []
        self._end = self._engine.observe_gradients(self._observe)

    def stop(self) -> None:
        """Stop listening."""
        if self._end is not None:
            self._end()
            self._end = None

    def finish(self, batches: Sequence[Batch], result: StepResult) -> Squares | None:
        """Stop listening and compare the step's micro-batches with its whole batch. Collective.

        A token weighs w / N in a gradient of a micro-batch, N being the valid tokens of the global batch and w the
        engine's `observed_weight`; the mean over the micro-batch's own n tokens is N / (w n) times that. Where tokens
        have weights of their own, N and n are sums of these, and a mean is as noisy as one of n^2 / (sum of their
        squares) tokens that weigh alike.

        Args:
            batches: this rank's micro-batches, in order.

        Returns:
            None where the whole batch is no larger than its micro-batches: only one of them has labels.
        """
        self.stop()
        totals = torch.zeros(len(batches), dtype=torch.float64, device=batches[0].tokens.device)
        for micro_batch, square in self._squares:
            totals[micro_batch] += square
        totals = all_reduce(totals, self._axes.model)
        weights = [loss_weights(batch).double() for batch in batches]
        sums = torch.stack([each.sum() for each in weights])
        squares = torch.stack([each.square().sum() for each in weights])
        has_tokens = sums > 0
        own = torch.where(has_tokens, sums, 1.0)
        means = totals / (self._engine.observed_weight * own * self._loss_scale) ** 2
        told = (means * has_tokens, squares / own**2, has_tokens, sums, squares)
        numbers = all_reduce(torch.stack([each.double().sum() for each in told]), self._axes.batch)
        small, inverse, number, weight, square = numbers.tolist()
        inverse_small, inverse_large = inverse / number, square / weight**2
        if number < 2 or inverse_small == inverse_large:
            return None
        return Squares(small * weight**2 / number, inverse_small, result.grad_norm**2, inverse_large)

    def _observe(self, parameter: nn.Parameter, gradient: Tensor, micro_batch: int) -> None:
        if parameter in self._counted:
            if self._axes.cp.size > 1:  # each has that of its own tokens
                gradient = all_reduce(gradient.detach().clone(), self._axes.cp)
            norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
            self._squares.append((micro_batch, norm.double().square()))
