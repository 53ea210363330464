"""QK-clip (Kimi K2, 2025, section 2.1): weights of queries and keys shrink where attention logits have grown too large.

    g = threshold / largest      of a head whose largest logit of the step's batch is above the threshold, else 1

    heads with keys of their own    rows of query and key times sqrt(g) each
    heads that share a key          the key times sqrt(s), s being the smallest g of those that share it; each of their
                                    queries times g / sqrt(s), so that every head's logits shrink by its own g
    heads made of latents           the parts that are not rotated times sqrt(g) each; the rotated part of the query
                                    times g, since its key is shared by all heads

Logits are linear in each, so the same batch would then reach the threshold at most. Biases and trained scales of
rounded weights shrink with their weights. It follows the update, on whatever slices a rank updates; momenta stay as
they are, and averages of weights shrink as the weights do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod

import torch
from torch import Tensor

from megalite.architecture.architecture import Architecture
from megalite.architecture.weights import SCALE
from megalite.config.optimizers import LEAD
from megalite.optim.rounding import update_and_round, update_in_place
from megalite.optim.slices import Slice, chunks, places_in_whole
from megalite.parallel.random import name_seed

CLIPPED_KINDS = ("weight", "bias", SCALE)
"""With the scales that a weight is rounded by, where these are trained, its rounded numbers shrink as it does."""

RowScales = Mapping[str, Tensor]
"""Factors of the rows of weights by canonical name, fp32 `[rows]`."""


def clipped_names(model: Architecture) -> tuple[str, ...]:
    """The weights of a block that may be scaled, without its name and `.weight`."""
    if model.mla is None:
        return ("attention.q", "attention.k")
    return ("attention.q" if model.mla.q_lora_rank is None else "attention.q_b", "attention.k_b")


def row_scales(largest: Tensor, threshold: float, model: Architecture) -> dict[str, Tensor]:
    """What to scale after an update.

    Args:
        largest: `[blocks, heads]`, the largest logit of each head.
    """
    factors = torch.where(largest > threshold, threshold / largest, 1.0).double()
    scales: dict[str, Tensor] = {}
    for index, of_heads in enumerate(factors):
        if bool((of_heads < 1.0).any()):
            for name, rows in zip(clipped_names(model), _of_block(of_heads, model), strict=True):
                scales |= {f"blocks.{index}.{name}.{kind}": rows.float() for kind in CLIPPED_KINDS}
    return scales


def _of_block(factors: Tensor, model: Architecture) -> tuple[Tensor, Tensor]:
    """Scales of the rows of queries and of keys, given those of the logits of each head."""
    if model.mla is not None:
        roots = factors.sqrt().unsqueeze(1).expand(-1, model.mla.qk_nope_head_dim)
        turned = factors.unsqueeze(1).expand(-1, model.mla.qk_rope_head_dim)
        return torch.cat((roots, turned), dim=1).flatten(), roots.flatten()
    block = model.block(0).attention
    by_key = factors.view(block.num_kv_heads, -1)
    of_keys = by_key.amin(1, keepdim=True).sqrt()
    of_queries = (by_key / of_keys).flatten()
    return of_queries.repeat_interleave(block.head_dim), of_keys.flatten().repeat_interleave(block.head_dim)


def scale_rows(slices: Sequence[Slice], scales: RowScales, *, rounds: bool, seed: int, step: int) -> None:
    """Scale rows of weights in place, and what they are ahead of their averages by (`optim.averaging`) as well.

    Args:
        slices: what this rank updates.
        rounds: weights live in bf16 and are rounded by chance, a function of `seed` and `step`.
    """
    parts = [part for part in slices if part.local.weight.name in scales]
    columns = {"scale": [_spread(part, scales[part.local.weight.name]) for part in parts]}

    def update(weights: list[Tensor], columns: dict[str, list[Tensor]]) -> None:
        torch._foreach_mul_(weights, columns["scale"])

    for part, scale in zip(parts, columns["scale"], strict=True):
        if LEAD in part.tensors:  # so that z and x are scaled as y is
            part.tensors[LEAD].mul_(scale)
    change = partial(update_and_round, seed=name_seed(seed, "qk_clip"), step=step) if rounds else update_in_place
    if parts:
        change(parts, columns, update)


def _spread(part: Slice, of_rows: Tensor) -> Tensor:
    """The scale of each number of a slice."""
    weight = part.tensors["weight"]
    of_rows, row_size = of_rows.to(weight.device), prod(part.local.weight.shape[1:])
    scale = torch.empty_like(weight, dtype=torch.float32)
    for chunk in chunks(weight):
        scale[chunk] = of_rows[places_in_whole(part, chunk, weight.device) // row_size]
    return scale
