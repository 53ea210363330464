"""Self-attention: one fused projection, rotary positions, grouped-query heads cut over tensor-parallel ranks.

Legend: t tokens, n query heads and m key and value heads of this rank, d head_dim, h hidden size.
"""

from __future__ import annotations

from torch import Tensor, nn

from megalite.config.mup import query_scale
from megalite.config.schema import ModelConfig
from megalite.layers.attention import Attend
from megalite.layers.documents import Documents
from megalite.layers.gemm import PLAIN, Gemm
from megalite.layers.linear import ColumnParallelLinear, RowParallelLinear
from megalite.layers.norm import HeadNorm
from megalite.layers.rope import rotate
from megalite.layers.scale import scaled_by
from megalite.parallel.axes import Axis


class SelfAttention(nn.Module):
    """Causal attention within each document of the stream. Shape: as the linear layers', `[t, h]` -> `[t, h]`.

    tp divides the key and value heads; `config.validate` refuses what does not.
    """

    def __init__(self, model: ModelConfig, *, tp: Axis, sequence_parallel: bool, attend: Attend, gemm: Gemm = PLAIN):
        super().__init__()
        self.head_dim = model.head_dim
        self.num_heads = model.num_heads // tp.size
        self.num_kv_heads = model.num_kv_heads // tp.size
        self.window = model.sliding_window
        self.rotary = model.positions == "rope"
        self.attend = attend
        self.scale_query = scaled_by(query_scale(model))
        q_width = self.num_heads * model.head_dim
        options = {"tp": tp, "sequence_parallel": sequence_parallel, "gemm": gemm}
        self.qkv = ColumnParallelLinear(
            model.hidden_size,
            (self.num_heads + 2 * self.num_kv_heads) * model.head_dim,
            bias=model.has_qkv_bias,
            **options,
        )
        self.o = RowParallelLinear(q_width, model.hidden_size, bias=model.has_output_bias, **options)
        self.q_norm = HeadNorm(model.head_dim, model.norm_eps, tp=tp) if model.qk_norm else None
        self.k_norm = HeadNorm(model.head_dim, model.norm_eps, tp=tp) if model.qk_norm else None

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
            q, k = rotate(q, documents.rotation), rotate(k, documents.rotation)
            if self.q_norm is None:
                v = v.contiguous()  # else the view would keep the whole projection until the backward pass
        return self.scale_query(q), k, v
