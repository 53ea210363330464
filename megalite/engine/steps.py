"""What both engines do around a step: turn batches into model inputs, weigh the loss, count tokens.

The loss of a step is the sum over the valid tokens of the whole global batch, divided by their number N. DeepSpeed
averages over accumulation steps and dp, so each token gets the weight `grad_accum_steps x dp / N`, and the averages
come out as the exact sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megalite.data.loader import Batch
from megalite.layers.documents import Ahead, Targets
from megalite.model.transformer import Stage
from megalite.parallel.axes import Axes, Axis
from megalite.parallel.collectives import all_reduce

PRODUCT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.bfloat16}
"""Format of the matrix products inside an optimizer, by `precision.dtype`; fp16 has too few exponents for them."""


def targets_of_batch(batch: Batch, scale: Tensor | float = 1.0) -> Targets:
    """Labels of a micro-batch, valid tokens weighted by `scale` and the others by 0."""
    ahead = () if batch.ahead is None else batch.ahead.unbind(0)
    further = (Ahead(tokens, labels, counts.to(torch.float32) * scale) for tokens, labels, counts in ahead)
    return Targets(batch.labels, batch.loss_mask.to(torch.float32) * scale, ahead=tuple(further))


def count_valid_tokens(batches: Sequence[Batch], batch_axis: Axis) -> Tensor:
    """Tokens of the global batch that count in the loss, as a number on the device. Collective."""
    return all_reduce(torch.stack([batch.loss_mask.sum() for batch in batches]).sum(), batch_axis)


def token_weight(num_micro_batches: int, replicas: Axis, num_tokens: Tensor) -> Tensor:
    """The weight of a valid token in the loss of its micro-batch, fp32; without any valid token as if there was one."""
    return (num_micro_batches * replicas.size / num_tokens.clamp(min=1).double()).float()


def token_axes(stage: Stage, axes: Axes) -> tuple[Axis, ...]:
    """Along which the ranks of a stage have other tokens, within its blocks."""
    return (axes.replicas, axes.tp) if stage.spec.sequence_parallel else (axes.replicas,)


def sums_on_host(loss: Tensor, num_tokens: Tensor) -> tuple[float, int]:
    """Two numbers of the device by one sync."""
    numbers = torch.stack((loss.double(), num_tokens.double())).tolist()
    return numbers[0], int(numbers[1])


def losses_of_step(loss: Tensor, stage: Stage) -> Tensor:
    """A step's loss with those of further predictions behind it, `[1 + layers]`; these are taken from the stage."""
    further, num_layers = stage.further.take_sums(), stage.spec.model.num_predictions
    if further is None:
        further = loss.new_zeros(num_layers)
    return torch.cat((loss.view(1), further.to(loss.dtype)))


def set_learning_rate(optimizer: Any, lr: float) -> None:
    """Set the rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def set_accumulation(engine: Any, num_micro_batches: int) -> None:
    """Tell a DeepSpeed engine how many micro-batches the coming step has; between steps only.

    It finds the last one by counting from the first step on, so the count starts anew when their number changes.
    """
    if num_micro_batches != engine.gradient_accumulation_steps():
        unit = engine.train_micro_batch_size_per_gpu() * engine.dp_world_size
        engine.set_train_batch_size(num_micro_batches * unit)
        engine.micro_steps = 0
