"""The gradient norm of a whole model replica, for the engine without ZeRO.

DeepSpeed reports no norm at ZeRO-0, and under a pipeline its clip forgets the other stages' parameters, so both are
done here. Every weight counts once: cut parameters on all tp ranks, replicated ones on the first, a tied pair on its
first stage.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from megalite.parallel.axes import Axes
from megalite.parallel.collectives import all_reduce


def global_grad_norm(parameters: Iterable[nn.Parameter], axes: Axes) -> torch.Tensor:
    """L2 norm of the gradients of one model replica, the same on all its ranks. Gradients are already summed over dp.

    Returns:
        scalar tensor, fp32 (fp64 for fp64 gradients).
    """
    squares = [
        torch.linalg.vector_norm(p.grad, dtype=torch.promote_types(p.grad.dtype, torch.float32)).square()
        for p in parameters
        if p.grad is not None and counts_here(p, axes)
    ]
    total = torch.stack(squares).sum() if squares else torch.zeros(())
    return all_reduce(total, axes.model).sqrt()


def clip(parameters: Iterable[nn.Parameter], norm: torch.Tensor, max_norm: float) -> None:
    """Scale gradients in place so that their global norm is at most `max_norm`."""
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    gradients = [p.grad for p in parameters if p.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, scale)


def drop_nonfinite(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], norm: torch.Tensor) -> None:
    """Make the coming step a skipped one when the norm is not finite, as ZeRO does from stage 1 on.

    Without gradients torch leaves a weight and its moments alone; `overflow` is where DeepSpeed looks for a skip.
    """
    optimizer.overflow = not bool(norm.isfinite())  # a sync; the norm is read on the host anyway
    if optimizer.overflow:
        for parameter in parameters:
            parameter.grad = None


def counts_here(parameter: nn.Parameter, axes: Axes) -> bool:
    """Whether this rank is the one of its model replica that counts a parameter, or its part of it, in a norm."""
    if getattr(parameter, "ds_pipe_replicated", False):
        return False
    return axes.tp.rank == 0 or getattr(parameter, "tensor_model_parallel", False)
