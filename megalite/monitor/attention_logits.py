"""The largest attention logit of every head over a step's global batch, exact: one forward pass that is watched.

Attention's kernels never show their scores, so scores of all queries are made once more, in fp32, from the queries and
keys that the pass hands to them: scaled, bounded by nothing, and without dropout. The pass belongs to batch and
weights, not to the layout: tp ranks have heads of their own, cp ranks queries, dp ranks samples, stages blocks, and the
largest of all is the same however these are cut. A step that is measured takes a forward pass longer, and these scores.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.layers.documents import Documents
from megalite.model.transformer import Stage
from megalite.monitor.activations import SCORES_AT_ONCE, logits_of, seen_keys, uncompiled
from megalite.parallel.axes import Axes
from megalite.parallel.collectives import all_reduce


class AttentionLogits:
    """Looks at queries and keys of a stage while a forward pass runs."""

    def __init__(self, stage: Stage, axes: Axes):
        self._stage, self._axes = stage, axes
        model, device = stage.spec.model, next(stage.parameters()).device
        self._largest = torch.empty(model.num_layers, model.num_heads, device=device)

    @torch.no_grad()
    def measure(self, forward: Callable[[], Any]) -> Tensor:
        """Run a forward pass over the global batch and return the largest logits `[blocks, heads]`, on the CPU, the
        same on all ranks. Collective."""
        self._largest.fill_(-torch.inf)
        with ExitStack() as stack, uncompiled():
            for index, block in self._stage.blocks_by_index().items():
                attention: Any = block.attention
                stack.callback(setattr, attention, "attend", attention.attend)
                attention.attend = partial(self._see, index, attention.attend)
            forward()
        return all_reduce(self._largest.clone(), self._axes.world, dist.ReduceOp.MAX).cpu()

    def _see(
        self,
        index: int,
        attend: Callable[..., Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Documents,
        window: int | None,
        **of_heads: Any,
    ) -> Tensor:
        places, keys = seen_keys(q, k, documents, self._axes.cp)
        first_head = self._axes.tp.rank * q.shape[1]
        largest = self._largest[index, first_head : first_head + q.shape[1]]
        size = max(1, SCORES_AT_ONCE // (q.shape[1] * keys.shape[0]))
        for queries in torch.arange(q.shape[0], device=q.device).split(size):
            logits, _ = logits_of(q[queries], keys, places[queries], documents.positions[queries], window)
            torch.maximum(largest, logits.amax((1, 2)), out=largest)
        return attend(q, k, v, documents, window, **of_heads)
