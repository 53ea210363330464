"""One transformer block: attention and MLP, each behind a norm and added to the residual stream (pre-norm)."""

from __future__ import annotations

from torch import Tensor, nn

from megalite.config.schema import ModelConfig
from megalite.layers.documents import Documents
from megalite.layers.mlp import MLP
from megalite.layers.parts import Parts
from megalite.layers.self_attention import SelfAttention
from megalite.parallel.axes import Axis
from megalite.parallel.collectives import keep, own_rows
from megalite.parallel.random import dropout, name_seed


class Dropout(nn.Module):
    """Dropout whose mask depends on the token, not on the layout; identity in evaluation.

    Shape: `[t, h]`, or `[t/tp, h]` when sequence parallel.
    """

    def __init__(self, rate: float, *, seed: int, site: str, tp: Axis, sequence_parallel: bool):
        super().__init__()
        self.rate = rate
        self.seed = name_seed(seed, site)
        self.tp = tp
        self.own = own_rows if sequence_parallel else keep

    def forward(self, x: Tensor, documents: Documents) -> Tensor:
        if not self.training or self.rate == 0.0:
            return x
        return dropout(x, self.own(documents.keys, self.tp), rate=self.rate, seed=self.seed)


class Block(nn.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`. Shape: `[t, h]`, or `[t/tp, h]` when sequence parallel."""

    def __init__(
        self, model: ModelConfig, index: int, *, tp: Axis, sequence_parallel: bool, parts: Parts, seed: int = 0
    ):
        super().__init__()
        options = {"tp": tp, "sequence_parallel": sequence_parallel}
        self.attention_norm = parts.norm(model.hidden_size, model.norm_eps, **options)
        self.attention = SelfAttention(model, attend=parts.attend, gemm=parts.gemm, **options)
        self.mlp_norm = parts.norm(model.hidden_size, model.norm_eps, **options)
        self.mlp = MLP(model, gemm=parts.gemm, **options)
        self.attention_dropout = Dropout(model.dropout, seed=seed, site=f"blocks.{index}.attention", **options)
        self.mlp_dropout = Dropout(model.dropout, seed=seed, site=f"blocks.{index}.mlp", **options)

    def forward(self, x: Tensor, documents: Documents) -> Tensor:
        x = x + self.attention_dropout(self.attention(self.attention_norm(x), documents), documents)
        return x + self.mlp_dropout(self.mlp(self.mlp_norm(x)), documents)
