"""Self-attention: one fused projection, rotary positions, grouped-query heads cut over tensor-parallel ranks.

Where there are more ranks than key and value heads, each head is cut over the ranks that have queries for it. They
multiply a part of it each, and gather the whole: so no weight is held twice, and nothing is computed twice.

Legend: t tokens, n query heads and m key and value heads of this rank, d head_dim, h hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from megalite.architecture.architecture import BlockSpec
from megalite.architecture.norms import NORMS
from megalite.layers.attention import Attend
from megalite.layers.attention_dropout import DroppingAttention, attention_now
from megalite.layers.documents import Documents
from megalite.layers.gemm import PLAIN, Gemm
from megalite.layers.linear import ColumnParallelLinear, RowParallelLinear
from megalite.layers.norm import AllHeadsNorm, HeadNorm
from megalite.layers.scale import scaled_by
from megalite.layers.turn import Turn
from megalite.parallel.axes import SINGLE, Axis, TensorParallel
from megalite.parallel.collectives import gather_rows

MakeNorm = Callable[..., nn.Module]


class SelfAttention(nn.Module):
    """Causal attention within each document of the stream. Shape: as the linear layers', `[t, h]` -> `[t, h]`.

    tp divides the key and value heads, or they divide it; `config.validate` refuses what does not.

    Args:
        dropping: how it attends in training, where weights are dropped; None for as ever.
        sharers: the tensor-parallel ranks that share a key and value head; see `axes.connect_sharers`.
    """

    def __init__(
        self,
        hidden_size: int,
        block: BlockSpec,
        *,
        tp: Axis,
        sequence_parallel: bool,
        attend: Attend,
        dropping: DroppingAttention | None = None,
        gemm: Gemm = PLAIN,
        sharers: Axis = SINGLE,
    ):
        super().__init__()
        spec = block.attention
        self.head_dim = spec.head_dim
        self.num_heads = spec.num_heads // tp.size
        self.num_kv_heads = spec.num_kv_heads * sharers.size // tp.size
        self.sharers = sharers
        self.window = spec.window
        self.turn = Turn(spec)
        self.attend, self.dropping = attend, dropping
        self.scale_query = scaled_by(spec.query_scale)
        options: TensorParallel = {"tp": tp, "sequence_parallel": sequence_parallel}
        self.qkv = ColumnParallelLinear(
            hidden_size,
            (spec.q_width + 2 * spec.kv_width) // tp.size,
            bias=spec.qkv_bias,
            gemm=gemm,
            **options,
        )
        self.o = RowParallelLinear(
            self.num_heads * spec.head_dim, hidden_size, bias=spec.output_bias, gemm=gemm, **options
        )
        self.sinks = nn.Parameter(torch.empty(self.num_heads)) if spec.sinks else None
        self.has_norms = bool(spec.qk_norm)
        if self.has_norms:
            kind, is_whole = NORMS[block.norm].of_heads, spec.qk_norm == "whole"
            of_queries: MakeNorm = partial(AllHeadsNorm, self.num_heads) if is_whole else HeadNorm
            of_keys: MakeNorm = partial(AllHeadsNorm, self.num_kv_heads, sharers=sharers) if is_whole else HeadNorm
            self.q_norm = of_queries(spec.head_dim, block.norm_eps, kind=kind, tp=tp)
            self.k_norm = of_keys(spec.head_dim, block.norm_eps, kind=kind, tp=tp)

    def forward(self, x: Tensor, documents: Documents) -> Tensor:
        q, k, v = self.project(x, documents)
        attend, of_heads = attention_now(self.attend, self.dropping, q)
        if self.sinks is not None:
            of_heads["sinks"] = self.sinks
        mixed = attend(q, k, v, documents, self.window, **of_heads)
        return self.o(mixed.flatten(1))

    def project(self, x: Tensor, documents: Documents) -> tuple[Tensor, Tensor, Tensor]:
        """Normalised, rotated and scaled queries `[t, n, d]`, keys `[t, m, d]`, and values `[t, m, d]`."""
        heads = self._whole_heads(self.qkv(x)).unflatten(1, (-1, self.head_dim))
        if self.has_norms:
            q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
            q, k = (self.turn(norm(each), documents) for norm, each in ((self.q_norm, q), (self.k_norm, k)))
        else:
            q, k, v = self.turn.take_apart(heads, documents, self.num_heads, self.num_kv_heads)
        return self.scale_query(q), k, v

    def _whole_heads(self, x: Tensor) -> Tensor:
        """Queries, keys and values `[t, (n + 2 m) d]`, given the parts of keys and values that this rank has made."""
        if self.sharers.size == 1:
            return x
        q, parts = x.split((self.num_heads * self.head_dim, 2 * self.head_dim // self.sharers.size), dim=1)
        of_all = gather_rows(parts, self.sharers).unflatten(0, (self.sharers.size, -1)).unflatten(2, (2, -1))
        return torch.cat((q, of_all.permute(1, 2, 0, 3).flatten(1)), dim=1)
