"""The second precision seam: which implementation of each part a model is made of, chosen once.

Layers receive their parts at construction and never ask again what device or format they run in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from megalite.addition import load
from megalite.architecture.architecture import Architecture
from megalite.architecture.attentions import ATTENTIONS
from megalite.architecture.norms import NORMS
from megalite.config.plan import LOSS_CHUNK_TOKENS
from megalite.layers.attention import (
    Attend,
    ScoreOptions,
    attend_by_document,
    attend_spelled_out,
    choose_attention,
    padded_values,
    takes_sinks,
)
from megalite.layers.context import ALL_HERE, LatentContext, OverContext, alone
from megalite.layers.cross_entropy import TokenLoss
from megalite.layers.documents import Documents
from megalite.layers.gemm import PLAIN, Gemm, choose_gemm
from megalite.layers.norm import RMSNorm
from megalite.layers.precision import ONE_FORMAT, Precision
from megalite.layers.weight_gradients import TakeGradient


@dataclass(frozen=True)
class Parts:
    """The choices that a model is built from. The defaults are exact in any format on any device."""

    attend: Attend = attend_by_document
    over_context: OverContext = alone
    """What context parallelism makes of it."""
    over_context_again: OverContext | None = None
    """The same in blocks that are recomputed, which find in the backward pass what was gathered; None for the same."""
    over_latents: LatentContext = ALL_HERE
    """And of latent attention."""
    gemm: Gemm = PLAIN
    norm: Callable[..., nn.Module] = RMSNorm
    """Of the stream; `architecture.norms` says how it is made."""
    loss_chunk_tokens: int = LOSS_CHUNK_TOKENS["cpu"]
    mlp_chunk_tokens: int | None = None
    """Tokens that an MLP works on at a time; None for all."""
    token_loss: TokenLoss | None = None
    """What training minimises; None for the cross-entropy."""
    take_gradient: TakeGradient | None = None
    """Gets the gradients of the weights that products make; None leaves them to autograd."""
    precision: Precision = ONE_FORMAT
    """Of the linear layers in the blocks; keeps state, so each stage has its own."""

    def attend_within(
        self, soft_cap: float | None, *, sinks: bool = False, is_redone: bool = False, drop: float = 0.0
    ) -> Attend:
        """The attention of a block, whose scores may be bounded, and which may be given sinks.

        Args:
            is_redone: in the backward pass, by recomputation.
            drop: probability of dropping a weight; such an attention is given seeds of heads.
        """
        over = self.over_context_again if is_redone and self.over_context_again is not None else self.over_context
        return over(self._attend(soft_cap, sinks=sinks, drop=drop))

    def attend_latents(self, soft_cap: float | None, *, drop: float = 0.0) -> Attend:
        """The same of a block whose keys and values are made of latents."""
        return self.over_latents.over(self._attend(soft_cap, drop=drop))

    def _attend(self, soft_cap: float | None, *, sinks: bool = False, drop: float = 0.0) -> Attend:
        if drop:
            return partial(attend_spelled_out, ScoreOptions(soft_cap, drop))
        if soft_cap is None and (not sinks or takes_sinks(self.attend)):
            return self.attend
        return partial(attend_spelled_out, ScoreOptions(soft_cap))


def choose_parts(
    model: Architecture,
    device_type: str,
    dtype: torch.dtype,
    precision: Precision = ONE_FORMAT,
    token_loss: TokenLoss | None = None,
    take_gradient: TakeGradient | None = None,
    num_tokens: int | None = None,
) -> Parts:
    """The best parts for a device and number format, and for micro-batches of so many tokens; None for many."""
    return Parts(
        attend=_choose_attention(model, device_type, dtype),
        gemm=choose_gemm(device_type, dtype, None if num_tokens is None else num_tokens * model.hidden_size**2),
        norm=load(NORMS[model.norm].module),
        loss_chunk_tokens=LOSS_CHUNK_TOKENS[device_type],
        token_loss=token_loss,
        take_gradient=take_gradient,
        precision=precision,
    )


def _choose_attention(model: Architecture, device_type: str, dtype: torch.dtype) -> Attend:
    """The attention that a model names; a plug-in's is left out of compiled blocks, and gets tensors in one piece."""
    function = ATTENTIONS[model.attention].function
    if function is None:
        return choose_attention(device_type, dtype)
    attend = load(function)

    @torch.compiler.disable
    def attend_whole(q: Tensor, k: Tensor, v: Tensor, documents: Documents, window: int | None) -> Tensor:
        return attend(q.contiguous(), k.contiguous(), v.contiguous(), documents, window)

    return padded_values(attend_whole)
