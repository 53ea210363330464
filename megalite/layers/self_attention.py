"""Self-attention: one fused projection, rotary positions, grouped-query heads cut over tensor-parallel ranks.

Legend: t tokens, n query heads and m key and value heads of this rank, d head_dim, h hidden size.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from megalite.architecture.architecture import AttentionSpec
from megalite.architecture.norms import NORMS
from megalite.layers.attention import Attend, attend_capped
from megalite.layers.documents import Documents
from megalite.layers.gemm import PLAIN, Gemm
from megalite.layers.linear import ColumnParallelLinear, RowParallelLinear
from megalite.layers.norm import AllHeadsNorm, HeadNorm
from megalite.layers.rope import rotate
from megalite.layers.scale import scaled_by
from megalite.parallel.axes import Axis


class SelfAttention(nn.Module):
    """Causal attention within each document of the stream. Shape: as the linear layers', `[t, h]` -> `[t, h]`.

    tp divides the key and value heads; `config.validate` refuses what does not.
    """

    def __init__(
        self,
        hidden_size: int,
        spec: AttentionSpec,
        *,
        norm: str,
        norm_eps: float,
        tp: Axis,
        sequence_parallel: bool,
        attend: Attend,
        gemm: Gemm = PLAIN,
    ):
        super().__init__()
        self.head_dim = spec.head_dim
        self.num_heads = spec.num_heads // tp.size
        self.num_kv_heads = spec.num_kv_heads // tp.size
        self.window = spec.window
        self.rotary, self.has_own_rope = spec.rope is not None, spec.has_own_rope
        self.attend = attend if spec.soft_cap is None else partial(attend_capped, spec.soft_cap)
        self.scale_query = scaled_by(spec.query_scale)
        options = {"tp": tp, "sequence_parallel": sequence_parallel, "gemm": gemm}
        self.qkv = ColumnParallelLinear(
            hidden_size,
            (self.num_heads + 2 * self.num_kv_heads) * spec.head_dim,
            bias=spec.qkv_bias,
            **options,
        )
        self.o = RowParallelLinear(self.num_heads * spec.head_dim, hidden_size, bias=spec.output_bias, **options)
        self.q_norm, self.k_norm = None, None
        if spec.qk_norm:
            is_whole, options = spec.qk_norm == "whole", {"kind": NORMS[norm].of_heads, "tp": tp}
            kinds = [partial(AllHeadsNorm, n) if is_whole else HeadNorm for n in (self.num_heads, self.num_kv_heads)]
            self.q_norm, self.k_norm = (make(spec.head_dim, norm_eps, **options) for make in kinds)

    def forward(self, x: Tensor, documents: Documents) -> Tensor:
        q, k, v = self.project(x, documents)
        mixed = self.attend(q, k, v, documents, self.window)
        return self.o(mixed.flatten(1))

    def project(self, x: Tensor, documents: Documents) -> tuple[Tensor, Tensor, Tensor]:
        """Normalised, rotated and scaled queries `[t, n, d]`, keys `[t, m, d]`, and values `[t, m, d]`."""
        heads = self.qkv(x).unflatten(1, (-1, self.head_dim))
        q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary:
            turn = documents.sliding_rotation if self.has_own_rope else documents.rotation
            q, k = rotate(q, turn), rotate(k, turn)
            if self.q_norm is None:
                v = v.contiguous()  # else the view would keep the whole projection until the backward pass
        return self.scale_query(q), k, v
