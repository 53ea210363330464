"""The gradient norm of a whole model replica, and clipping for the engine without ZeRO.

DeepSpeed reports no norm at ZeRO-0, under a pipeline its clip forgets the other stages' parameters, and elsewhere it
waits for the device while it computes the norm; so the norm is computed here at every ZeRO stage. Every weight counts
once: cut parameters on all tp ranks, replicated ones on the first, a tied pair on its first stage.

Squares are added up in fp32 over some ten thousand numbers, as a GPU's kernel does by itself, and from there on in
fp64. Torch's kernel for CPUs adds up a whole tensor in fp32: 5e-4 off for 12 million numbers, 4e-3 for 50 million,
where the sum of pieces is 2e-7 off and takes as long; all in fp64, as DeepSpeed has it, takes twenty times as long.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from megalite.model.initialize import CUT_MARK
from megalite.parallel.axes import Axes, Axis
from megalite.parallel.collectives import all_reduce

PIECE = 2**16
"""Numbers whose squares a CPU adds up in fp32."""

END_COPY_MARK = "is_copy_at_end"
"""Attribute of a parameter that is left out of norms, since another stage has it too."""


class Skippable(Protocol):
    """An optimizer of DeepSpeed's."""

    overflow: bool
    """The coming step is skipped."""


def norm_over(axes: Iterable[Axis], gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """L2 norm of gradients of which every rank of the axes has others. Collective, and nothing waits for it.

    Returns:
        fp32 scalar on the device, the same on all these ranks.
    """
    total = squared_norm(gradients, device)
    for axis in axes:
        total = all_reduce(total, axis)
    return total.sqrt().float()


def squared_norm(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """The sum of all squares: fp64 scalar on a device, wherever the gradients are."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    if gradients[0].device.type == "cpu":
        gradients = [piece for gradient in gradients for piece in gradient.flatten().split(PIECE)]
    norms = torch._foreach_norm(list(gradients), 2.0, torch.float32)
    return torch.stack(norms).double().square().sum().to(device)


def global_grad_norm(parameters: Iterable[nn.Parameter], axes: Axes, device: torch.device) -> Tensor:
    """L2 norm of the gradients of one model replica, the same on all its ranks. They are already summed over dp."""
    gradients = [p.grad for p in parameters if p.grad is not None and counts_here(p, axes)]
    return norm_over((axes.model,), gradients, device)


def clip(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale gradients in place so that their global norm, known on the host, is at most `max_norm`."""
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    gradients = [p.grad for p in parameters if p.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, scale.item())


def drop_nonfinite(optimizer: Skippable, parameters: Iterable[nn.Parameter], norm: Tensor) -> None:
    """Make the coming step a skipped one when the norm, known on the host, is not finite: as ZeRO does from stage 1 on.

    Without gradients torch leaves a weight and its moments alone; `overflow` is where DeepSpeed looks for a skip.
    """
    optimizer.overflow = not bool(norm.isfinite())
    if optimizer.overflow:
        for parameter in parameters:
            parameter.grad = None


def counts_here(parameter: nn.Parameter, axes: Axes) -> bool:
    """Whether this rank is the one of its model replica that counts a parameter, or its part of it, in a norm."""
    if getattr(parameter, END_COPY_MARK, False):
        return False
    return axes.tp.rank == 0 or getattr(parameter, CUT_MARK, False)
