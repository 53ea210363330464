"""From the gradients of a step to its update: hooks, norm, clipping, gate, and the numbers of the step.

    gradients are there -> hooks.before_update -> norm --one sync--> loss, tokens, norm on the host
                        -> vetoes -> clip -> around_update(update)

From ZeRO-1 on, norm and clipping are DeepSpeed's, inside its `step`; without ZeRO they are ours, before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megalite.config.schema import Config
from megalite.engine import grad_norm
from megalite.engine.deepspeed.gate import UpdateGate
from megalite.engine.deepspeed.step_numbers import StepNumbers
from megalite.engine.hooks import UpdateHooks
from megalite.engine.protocol import NO_TOKENS, Ask, NonFiniteLossError, StepResult
from megalite.parallel.axes import Axes
from megalite.parallel.collectives import all_reduce, on_device


class UpdateStep:
    """The end of every step of a DeepSpeed engine.

    Args:
        engine: DeepSpeed's.
        parameters: of the stage.
        hooks: who has a say.
    """

    def __init__(self, engine: Any, parameters: Sequence[nn.Parameter], config: Config, axes: Axes, hooks: UpdateHooks):
        self._engine, self._parameters, self._axes, self._hooks = engine, parameters, axes, hooks
        self._clips_here = config.parallel.zero_stage == 0
        self._stop_on_nonfinite = config.health.stop_on_nonfinite
        self._gate = UpdateGate(engine.optimizer)
        self._numbers = StepNumbers(engine.optimizer, axes, config.parallel.zero_stage, self._see_loss)
        self._clip_norm: float | None = None
        self._own_norm = math.nan

    def set_clipping(self, max_norm: float | None) -> None:
        """Set the largest gradient norm of the coming update; None for no clipping."""
        self._clip_norm = max_norm
        if not self._clips_here:
            self._engine.optimizer.clip_grad = max_norm or 0.0

    def prepare(self, loss: Tensor, num_tokens: Tensor, ask: Ask) -> None:
        """Make ready for DeepSpeed's `step`, which follows at once. Collective.

        Args:
            loss: of the step, and of further predictions, `[1 + layers]`, the same on all ranks.
            num_tokens: valid tokens of the global batch.
            ask: what this rank has to tell all others.
        """
        self._hooks.prepare()
        told = on_device(ask(), torch.float64, self._engine.device)
        self._numbers.expect(loss, num_tokens, all_reduce(told, self._axes.world) if told.numel() else told)
        if self._clips_here:
            norm = self._numbers.fetch(grad_norm.global_grad_norm(self._parameters, self._axes, self._engine.device))
            self._own_norm = norm.item()
            grad_norm.drop_nonfinite(self._engine.optimizer, self._parameters, norm)
            if self._clip_norm is not None:
                grad_norm.clip(self._parameters, norm, self._clip_norm)
        self._gate.prepare(self._veto, self._hooks.apply)

    def result(self, lr: float) -> StepResult:
        """What the step has done, after DeepSpeed's `step`."""
        norm = self._own_norm if self._clips_here else float(self._engine.get_global_grad_norm())
        why = self._gate.why if self._engine.was_step_applied() else f"gradient norm is {norm}"
        loss, num_tokens = self._numbers.loss, self._numbers.num_tokens
        mean, told = loss if num_tokens else math.nan, self._numbers.told
        further = self._numbers.further
        return StepResult(mean, norm, lr, num_tokens, skipped=bool(why), why=why, further=further, told=told)

    def _veto(self) -> str:
        norm = self._own_norm if self._clips_here else float(self._engine.optimizer._global_grad_norm)
        if not math.isfinite(norm):
            return ""  # left out already
        if not self._numbers.num_tokens:
            return NO_TOKENS  # nothing was learned and nothing may decay
        return self._hooks.veto(self._numbers.loss, norm)

    def _see_loss(self, loss: float) -> None:
        if not math.isfinite(loss) and self._stop_on_nonfinite:
            raise NonFiniteLossError(f"the loss is {loss}")
