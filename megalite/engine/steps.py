"""What both engines do around a step: turn batches into model inputs, weigh the loss, count tokens.

The loss of a step is the sum over the valid tokens of the whole global batch of weight x cross-entropy, divided by the
sum W of their weights; where nothing says otherwise each weighs 1, and W is their number. DeepSpeed averages over
accumulation steps and dp, so each token's weight is multiplied by `grad_accum_steps x dp / W`, and the averages come
out as the exact sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite.data.loader import Batch
from megalite.engine.protocol import LossSum
from megalite.layers.documents import Ahead, Targets
from megalite.model.transformer import Stage
from megalite.parallel.axes import Axes, Axis
from megalite.parallel.collectives import all_reduce

PRODUCT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.bfloat16}
"""Format of the matrix products inside an optimizer, by `precision.dtype`; fp16 has too few exponents for them."""


def targets_of_batch(batch: Batch, scale: Tensor | float = 1.0) -> Targets:
    """Labels of a micro-batch, valid tokens weighted by `scale` times their weight and the others by 0."""
    ahead = () if batch.ahead is None else batch.ahead.unbind(0)
    weights = (
        [counts.to(torch.float32) for _, _, counts in ahead] if batch.ahead_weights is None else batch.ahead_weights
    )
    further = (Ahead(tokens, labels, own * scale) for (tokens, labels, _), own in zip(ahead, weights, strict=False))
    return Targets(batch.labels, loss_weights(batch) * scale, ahead=tuple(further))


def loss_weights(batch: Batch) -> Tensor:
    """How much each label of a micro-batch weighs, `[t]` fp32; 0 for those that do not count."""
    return batch.loss_mask.to(torch.float32) if batch.weights is None else batch.weights


class LossCount(NamedTuple):
    """What of a global batch counts in the loss, as numbers on the device."""

    num_tokens: Tensor
    """Valid tokens, int64."""
    weight: Tensor
    """The sum of their weights, float64; without loss weights it is their number. Of pairs, the number of these."""

    @property
    def divisor(self) -> Tensor:
        """By which a sum of losses is divided, float64: without any valid token 1."""
        return torch.where(self.weight > 0, self.weight, 1.0)


def count_loss(batches: Sequence[Batch], batch_axis: Axis) -> LossCount:
    """What of the global batch counts in the loss. Collective. The weights are short numbers (`data.indexed`), whose
    sum is the same in any order."""
    num_tokens = torch.stack([batch.loss_mask.sum() for batch in batches]).sum()
    if batches[0].weights is None:
        num_tokens = all_reduce(num_tokens, batch_axis)
        return LossCount(num_tokens, num_tokens.double())
    own = [loss_weights(batch).double().sum() if batch.pairs is None else batch.pairs for batch in batches]
    weight = torch.stack(own).sum()
    found = all_reduce(torch.stack((num_tokens.double(), weight)), batch_axis)
    return LossCount(found[0].long(), found[1])


def token_weight(num_micro_batches: int, replicas: Axis, count: LossCount) -> Tensor:
    """The weight of a token of weight 1 in the loss of its micro-batch, fp32."""
    return (num_micro_batches * replicas.size / count.divisor).float()


def token_axes(stage: Stage, axes: Axes) -> tuple[Axis, ...]:
    """Along which the ranks of a stage have other tokens, within its blocks."""
    return (axes.replicas, axes.tp) if stage.spec.sequence_parallel else (axes.replicas,)


def sums_on_host(loss: Tensor, count: LossCount) -> LossSum:
    """Numbers of the device by one sync."""
    total, num_tokens, weight = torch.stack((loss.double(), count.num_tokens.double(), count.weight)).tolist()
    return LossSum(total, int(num_tokens), weight)


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
