"""Squared gradient norms of single micro-batches, which an engine only ever hands out summed up.

A hook on each parameter sees its gradient of one backward pass, before it is added to those before, reduced or cut, so
this is the same at every ZeRO stage; each weight counts on one rank of a model replica. Hooks are there only in steps
that are measured: others cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from megalite.data.loader import Batch
from megalite.engine.grad_norm import counts_here
from megalite.engine.protocol import StepResult
from megalite.model.transformer import Stage
from megalite.optim.noise_scale import Squares
from megalite.parallel.axes import Axes
from megalite.parallel.collectives import all_reduce


class MicroGradients:
    """Measures one step at a time: `start`, the step, `finish`."""

    def __init__(self, stage: Stage, axes: Axes):
        self._parameters = [parameter for parameter in stage.parameters() if counts_here(parameter, axes)]
        self._axes = axes
        self._squares: list[list[Tensor]] = []
        self._loss_scale = 1.0
        self._handles: list[RemovableHandle] = []

    def start(self, loss_scale: float = 1.0) -> None:
        """Begin to listen to a step whose loss is scaled so."""
        self._loss_scale = loss_scale
        self._squares = [[] for _ in self._parameters]
        self._handles = [
            parameter.register_hook(_collect(squares))
            for parameter, squares in zip(self._parameters, self._squares, strict=True)
        ]

    def stop(self) -> None:
        """Stop listening."""
        for handle in self._handles:
            handle.remove()

    def finish(self, batches: Sequence[Batch], result: StepResult) -> Squares:
        """Stop listening and compare the step's micro-batches with its whole batch. Collective.

        Both engines weigh each token by dp / N in a rank's gradient of a micro-batch, N being the valid tokens of the
        global batch; the mean over the micro-batch's own n tokens is N / (dp n) times that.

        Args:
            batches: this rank's micro-batches, in order.
        """
        self.stop()
        device = batches[0].tokens.device
        totals = torch.zeros(len(batches), dtype=torch.float64, device=device)
        for squares in self._squares:
            totals += torch.stack(squares)
        totals = all_reduce(totals, self._axes.model)
        counts = torch.stack([batch.loss_mask.sum() for batch in batches]).to(torch.float64)
        has_tokens = counts > 0
        counts = counts.clamp(min=1.0)
        means = totals * (result.num_tokens / (self._axes.replicas.size * counts * self._loss_scale)) ** 2
        sums = torch.stack([(means * has_tokens).sum(), (has_tokens / counts).sum(), has_tokens.sum()])
        small, inverse, number = all_reduce(sums, self._axes.batch).tolist()
        return Squares(small / number, inverse / number, result.grad_norm**2, 1.0 / result.num_tokens)


def _collect(squares: list[Tensor]) -> Callable[[Tensor], None]:
    def collect(gradient: Tensor) -> None:
        squares.append(torch.linalg.vector_norm(gradient, dtype=torch.float32).double().square())

    return collect
