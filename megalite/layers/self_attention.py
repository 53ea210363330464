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
from megalite.parallel.axes import Axis, TensorParallel


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
        options: TensorParallel = {"tp": tp, "sequence_parallel": sequence_parallel}
        self.qkv = ColumnParallelLinear(
            hidden_size,
            (self.num_heads + 2 * self.num_kv_heads) * spec.head_dim,
            bias=spec.qkv_bias,
            gemm=gemm,
            **options,
        )
        self.o = RowParallelLinear(
            self.num_heads * spec.head_dim, hidden_size, bias=spec.output_bias, gemm=gemm, **options
        )
        self.has_norms = bool(spec.qk_norm)
        if self.has_norms:
            kind, is_whole = NORMS[norm].of_heads, spec.qk_norm == "whole"
            makes = [partial(AllHeadsNorm, n) if is_whole else HeadNorm for n in (self.num_heads, self.num_kv_heads)]
            self.q_norm, self.k_norm = (make(spec.head_dim, norm_eps, kind=kind, tp=tp) for make in makes)

    def forward(self, x: Tensor, documents: Documents) -> Tensor:
        q, k, v = self.project(x, documents)
        mixed = self.attend(q, k, v, documents, self.window)
        return self.o(mixed.flatten(1))

    def project(self, x: Tensor, documents: Documents) -> tuple[Tensor, Tensor, Tensor]:
        """Normalised, rotated and scaled queries `[t, n, d]`, keys `[t, m, d]`, and values `[t, m, d]`."""
        heads = self.qkv(x).unflatten(1, (-1, self.head_dim))
        queries_and_keys, v = heads.split((self.num_heads + self.num_kv_heads, self.num_kv_heads), dim=1)
        if not self.has_norms:
            queries_and_keys = self._turn(queries_and_keys, documents)
        q, k = queries_and_keys.split((self.num_heads, self.num_kv_heads), dim=1)
        if self.has_norms:
            q, k = (self._turn(norm(each), documents) for norm, each in ((self.q_norm, q), (self.k_norm, k)))
        elif self.rotary:
            v = v.contiguous()  # else the view would keep the whole projection until the backward pass
        return self.scale_query(q), k, v

    def _turn(self, heads: Tensor, documents: Documents) -> Tensor:
        """Rotate heads `[t, any, d]`, in a model that does."""
        if not self.rotary:
            return heads
        turn = documents.sliding_rotation if self.has_own_rope else documents.rotation
        assert turn is not None, "the stage turns the stream once a pass"
        return rotate(heads, turn)
