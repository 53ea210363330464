"""From the sums of a step's gradients to new weights.

sums are reduced -> hooks.before_update -> norm --one look--> loss, tokens, norm, what ranks tell, on the host
                 -> vetoes -> scaled and clipped -> around_update(update) -> weights are gathered
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from megalite.engine.grad_norm import squared_norm
from megalite.engine.hooks import UpdateHooks
from megalite.engine.loss_scaling import LossScaler
from megalite.engine.protocol import NO_TOKENS, Ask, NonFiniteLossError, StepResult
from megalite.optim.optimizer import SlicedOptimizer
from megalite.parallel.axes import Axes
from megalite.parallel.collectives import all_reduce, on_device


class Updated(Protocol):
    """Some numbers that this rank updates."""

    master: Tensor
    """Flat, at least fp32; its gradient is set for the update."""

    @property
    def gradient(self) -> Tensor:
        """Their gradients, reduced, while a step ends; on the master's device."""
        ...

    def round_weights(self) -> None:
        """Have the weights that compute follow them."""
        ...


class Update:
    """The end of every step.

    Args:
        buckets: of the stage; what the optimizer works on is theirs.
        counted: indices of the optimizer's slices that this rank counts in the norm of the whole model.
        scaler: in fp16.
    """

    def __init__(
        self,
        optimizer: SlicedOptimizer,
        buckets: Sequence[Updated],
        axes: Axes,
        hooks: UpdateHooks,
        *,
        counted: Sequence[int],
        scaler: LossScaler | None,
        stop_on_nonfinite: bool,
    ):
        self._optimizer, self._buckets, self._axes, self._hooks = optimizer, buckets, axes, hooks
        self._counted, self._scaler, self._stop_on_nonfinite = counted, scaler, stop_on_nonfinite

    def make(self, loss: Tensor, num_tokens: Tensor, *, lr: float, clip_norm: float | None, ask: Ask) -> StepResult:
        """Update the weights, or leave them. The reduced sums are there. Collective.

        Args:
            loss: this rank's share of the step's loss, and of those of further predictions, `[1 + layers]` fp32: added
                up over all ranks they are the step's.
            num_tokens: valid tokens of the global batch.
            ask: what this rank has to tell all others; equally many numbers on each.
        """
        for bucket in self._buckets:
            bucket.master.grad = bucket.gradient
        self._hooks.prepare()
        self._optimizer.forget_frozen()
        gradients = self._optimizer.gradients()
        squares = squared_norm([gradients[index] for index in self._counted], loss.device)
        mine = torch.cat((squares.view(1), loss.double()))
        if own := ask():
            mine = torch.cat((mine, on_device(own, mine.dtype, mine.device)))
        numbers = all_reduce(mine, self._axes.world)
        scale = self._scaler.scale if self._scaler is not None else 1.0
        tokens, squared, total, *others = torch.cat(
            (num_tokens.double().view(1), numbers)
        ).tolist()  # the step's one sync
        further, told = others[: len(loss) - 1], others[len(loss) - 1 :]
        step_loss, norm = total / scale, math.sqrt(squared) / scale if squared >= 0.0 else math.nan
        if not math.isfinite(step_loss) and self._stop_on_nonfinite:
            raise NonFiniteLossError(f"the loss is {step_loss}")
        if self._scaler is not None:
            self._scaler.update(has_overflowed=not math.isfinite(norm))
        why = self._reason_to_skip(step_loss, norm, int(tokens))
        if not why:
            self._scale_gradients(norm, scale, clip_norm)
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._hooks.apply(self._apply)
        for bucket in self._buckets:
            bucket.master.grad = None
        return StepResult(
            step_loss if tokens else math.nan,
            norm,
            lr,
            num_tokens=int(tokens),
            skipped=bool(why),
            why=why,
            further=[each / scale for each in further],
            told=[int(number) for number in told],
        )

    def _reason_to_skip(self, loss: float, norm: float, num_tokens: int) -> str:
        if not math.isfinite(norm):
            return f"gradient norm is {norm}"
        if not num_tokens:
            return NO_TOKENS  # nothing was learned and nothing may decay
        return self._hooks.veto(loss, norm)

    def _scale_gradients(self, norm: float, scale: float, clip_norm: float | None) -> None:
        factor = 1.0 if clip_norm is None else min(1.0, clip_norm / (norm + 1e-6))
        if factor != 1.0 or scale != 1.0:
            gradients = [bucket.master.grad for bucket in self._buckets if bucket.master.grad is not None]
            torch._foreach_mul_(gradients, factor / scale)

    def _apply(self) -> None:
        self._optimizer.step()
        for bucket in self._buckets:
            bucket.round_weights()
