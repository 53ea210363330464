"""Causal attention that any head may turn down: softmax with one more place that nothing stands in."""

import torch
from torch import Tensor

from megalite import extend
from megalite.layers.documents import Documents


@extend.attention("softmax_one")
def softmax_one(q: Tensor, k: Tensor, v: Tensor, documents: Documents, window: int | None) -> Tensor:
    pieces = zip(*(x.split(documents.lengths) for x in (q, k, v)), strict=True)
    return torch.cat([_attend(*piece, window) for piece in pieces])


def _attend(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """One document of s tokens: q [s, n, d], k and v [s, m, d]."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qnd,knd->nqk", q, k).float() / q.shape[2] ** 0.5
    back = torch.arange(len(q))[:, None] - torch.arange(len(q))
    scores = scores.masked_fill((back < 0) | (back >= (window or len(q))), float("-inf"))
    weights = torch.cat([scores, torch.zeros_like(scores[..., :1])], dim=-1).softmax(-1)[..., :-1]
    return torch.einsum("nqk,knd->qnd", weights.to(v.dtype), v)
