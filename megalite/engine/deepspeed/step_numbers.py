"""One wait for the device a step: the loss, the number of valid tokens and the gradient norm reach the host together.

To read a number on a GPU is to wait until everything queued before it is done, while nothing new is queued behind it.
A step has to do that once: whether it is applied goes by its loss and its norm. DeepSpeed's optimizers look at the
norm, or at gradients for overflows, two to four times more inside their `step`. All they do with it are operations
where the norm is, so a norm that is on the host already costs them nothing: it is computed here, fetched along with
the rest, and handed to them at the place where each would have computed its own.

    ZeRO-0            our own update                    engine/grad_norm.py
    ZeRO-1 in bf16    BF16_Optimizer                    the function that `step` calls for the norm
    ZeRO-1, ZeRO-2    DeepSpeedZeroOptimizer            `scaled_global_norm`; `check_overflow` finds nothing
    ZeRO-3            DeepSpeedZeroOptimizer_Stage3     `_get_norm_groups`; the same

Gradients that overflow show in the norm: it is not finite then, and DeepSpeed leaves the step out for that as well.
(DeepSpeed 0.19.8; the tests that count what a step waits for are tests/stand_in/test_rank.py.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megalite.engine.grad_norm import counts_here, norm_over
from megalite.parallel.axes import Axes

INVALID = -1.0
"""What DeepSpeed takes for a norm that is infinite or undefined."""


class StepNumbers:
    """Fetches the numbers of a step when its norm is known.

    Args:
        optimizer: DeepSpeed's, or the torch optimizer itself at ZeRO-0.
        axes: of this rank.
        zero_stage: of the run.
        see_loss: told the loss as soon as it is known, when nothing has changed yet; may raise on all ranks.
    """

    def __init__(self, optimizer: Any, axes: Axes, zero_stage: int, see_loss: Callable[[float], None]):
        self.loss, self.num_tokens, self.further, self.told = 0.0, 0, list[float](), list[int]()
        """Of the last step; valid from when its norm was fetched."""
        self._optimizer, self._axes, self._see_loss = optimizer, axes, see_loss
        self._waiting: tuple[Tensor, Tensor, Tensor] | None = None
        if zero_stage == 3:
            optimizer._get_norm_groups = lambda: [self._norm_of_slices(optimizer.fp16_groups[0])]
            optimizer.check_overflow = _find_nothing
        elif hasattr(optimizer, "scaled_global_norm"):
            optimizer.scaled_global_norm = lambda: self._norm_of_slices(optimizer.params_in_partition[0])
            optimizer.check_overflow = _find_nothing
        elif zero_stage:
            optimizer.step = self._around_bf16_step(optimizer.step)

    def expect(self, loss: Tensor, num_tokens: Tensor, told: Tensor) -> None:
        """Fetch these, equal on all ranks of a model replica, along with the coming norm: the losses `[1 + further]`,
        a scalar, and `[any]`."""
        self._waiting = loss, num_tokens, told

    def fetch(self, norm: Tensor) -> Tensor:
        """The norm on the host, and with it what was expected. The step's one sync."""
        assert self._waiting is not None, "a norm of no step"
        (loss, num_tokens, told), self._waiting = self._waiting, None
        scalars = torch.stack([each.detach().double() for each in (num_tokens, norm)])
        tokens, norm_here, self.loss, *others = torch.cat((scalars, loss.double(), told)).tolist()
        self.further, others = others[: len(loss) - 1], others[len(loss) - 1 :]
        self.num_tokens, self.told = int(tokens), [int(number) for number in others]
        self._see_loss(self.loss)
        return torch.tensor(norm_here, dtype=norm.dtype)

    def _norm_of_slices(self, parameters: Sequence[torch.nn.Parameter]) -> Tensor:
        """The norm, fetched, of the slices of gradients that ZeRO has left on this rank: all weights are in one group.
        Padding between them is marked; behind the last one it may be not, and is all there is on a rank without any."""
        everything = self._optimizer.averaged_gradients[0]
        gradients = [g for g in everything if not getattr(g, "_zero_padding", False)]
        assert len(gradients) >= len(parameters), "a gradient is missing"
        counted = [g for g, p in zip(gradients, parameters, strict=False) if counts_here(p, self._axes)]
        norm = norm_over((self._axes.replicas, self._axes.model), counted, everything[0].device)
        return _marked(self.fetch(norm))

    def _around_bf16_step(self, step: Callable[[], None]) -> Callable[[], None]:
        from deepspeed.runtime import bf16_optimizer

        def norm_of_tensors(input_tensors: list[Tensor], **_: Any) -> Tensor:
            device = self._optimizer.fp32_groups_flat_partition[0].device
            return _marked(self.fetch(norm_over((self._axes.model,), input_tensors, device)))

        def step_with_our_norm() -> None:
            theirs = bf16_optimizer.get_global_norm_of_tensors
            bf16_optimizer.get_global_norm_of_tensors = norm_of_tensors
            try:
                step()
            finally:
                bf16_optimizer.get_global_norm_of_tensors = theirs

        return step_with_our_norm


def _marked(norm: Tensor) -> Tensor:
    """The norm as DeepSpeed's own functions return it."""
    return norm if norm.isfinite() else torch.full_like(norm, INVALID)


def _find_nothing(**_: Any) -> None:
    """Stands where DeepSpeed looks for overflows among gradients, one wait before it looks at their norm."""
