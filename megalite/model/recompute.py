"""Activation recomputation: what a block keeps for its backward pass.

    none       everything
    selective  results of matrix products, attention and collectives; norms, activations and rotations are redone
    full       the block's input only; the forward pass runs twice (Chen et al. 2016)

Dropout needs no saved random state: its masks are functions of the token (`parallel.random`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from megalite.layers.documents import Documents

RunBlock = Callable[[torch.nn.Module, Tensor, Documents], Tensor]


def choose_recompute(kind: str) -> RunBlock:
    """How to run a block under `train.recompute`."""
    return {"none": _run, "selective": _run_selective, "full": _run_full}[kind]


def _run(block: torch.nn.Module, x: Tensor, documents: Documents) -> Tensor:
    return block(x, documents)


def _run_full(block: torch.nn.Module, x: Tensor, documents: Documents) -> Tensor:
    return checkpoint(block, x, documents, use_reentrant=False, preserve_rng_state=False)


def _run_selective(block: torch.nn.Module, x: Tensor, documents: Documents) -> Tensor:
    contexts = partial(create_selective_checkpoint_contexts, _keep_products)
    return checkpoint(block, x, documents, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


_KEPT_NAMESPACE = "_c10d_functional"
"""Our collectives. Not `c10d`: those are in place, so a kept result would be wrong, and ZeRO-3 gathers with them."""

_KEPT_WORDS = ("mm", "attention", "varlen_attn")


def _keep_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep what is dear to make: products (mm, addmm, bmm), attention kernels, and our collectives."""
    namespace, _, name = op.name().partition("::")
    dear = namespace == _KEPT_NAMESPACE or any(word in name for word in _KEPT_WORDS)
    return CheckpointPolicy.MUST_SAVE if dear else CheckpointPolicy.PREFER_RECOMPUTE
