"""Losses of micro-batches without gradients, where a rank has the whole model or gathers it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megalite.data.loader import Batch
from megalite.engine.batch_cut import BatchCut, documents_of_batch
from megalite.engine.protocol import LossSum
from megalite.engine.steps import count_loss, sums_on_host, targets_of_batch
from megalite.layers.documents import Documents, Targets
from megalite.parallel.axes import Axes
from megalite.parallel.collectives import all_reduce

Run = Callable[[Tensor, Documents, Targets], Tensor]
"""Given tokens `[t]`, the loss: a scalar."""


@torch.no_grad()
def sum_losses(run: Run, cut: BatchCut, batches: Sequence[Batch], axes: Axes, device: torch.device) -> LossSum:
    """The sum of the global batch's losses. Collective; see `Engine.eval_step`."""
    count = count_loss(batches, axes.batch)
    total = torch.zeros((), dtype=torch.float32, device=device)
    for batch in map(cut.own, batches):
        total += run(batch.tokens, documents_of_batch(batch), targets_of_batch(batch))
    return sums_on_host(all_reduce(total, axes.replicas), count)


@torch.no_grad()
def token_losses(run: Run, cut: BatchCut, batches: Sequence[Batch]) -> list[Tensor]:
    """The loss of each token of each micro-batch; see `Engine.token_losses`."""
    found = []
    for batch in batches:
        own = cut.own(batch)
        targets = targets_of_batch(own)
        targets.losses = torch.zeros_like(targets.weights)
        run(own.tokens, documents_of_batch(own), targets)
        found.append(cut.whole(targets.losses, own, batch))
    return found
