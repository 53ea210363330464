"""Multi-head latent attention (DeepSeek-V2, 2024, section 2.1): keys and values are made of few numbers a token.

    x -> a -> q latent  -> norm -> q_b -> q  [t, n, nope | rope]
              kv latent -> norm -> kv_b -> k [t, n, nope], v [t, n, value]
              k rope    -> one head's worth, rotated, the same for all heads

Under tensor parallelism heads are cut and latents are not. With sequence parallelism each rank makes those of its own
tokens, and these are gathered in place of the stream: 2,112 numbers a token in DeepSeek-V3 where the stream has 7,168.
Under context parallelism latents are gathered, too (576 numbers a token where keys and values are 40,960), and each
rank makes heads of all of them.

Legend: t tokens, h hidden size, n heads of this rank.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megalite.architecture.architecture import BlockSpec
from megalite.architecture.norms import NORMS
from megalite.layers.attention import Attend
from megalite.layers.attention_dropout import DroppingAttention, attention_now
from megalite.layers.context import WholeStream
from megalite.layers.documents import Documents
from megalite.layers.gemm import PLAIN, Gemm
from megalite.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from megalite.layers.norm import NORM_OF_HEADS
from megalite.layers.scale import scaled_by
from megalite.layers.turn import Turn
from megalite.parallel.axes import Axis, TensorParallel
from megalite.parallel.collectives import copy_to, gather_rows


class LatentAttention(nn.Module):
    """Causal attention within each document of the stream. Shape: `[t, h]` -> `[t, h]`, `[t/tp, h]` each when sequence
    parallel.

    Args:
        attend: takes values of another width than queries and keys.
        dropping: the same in training, where weights are dropped; None for as ever.
        whole: given this rank's latents, those of all tokens that its queries may see.
    """

    def __init__(
        self,
        hidden_size: int,
        block: BlockSpec,
        *,
        tp: Axis,
        sequence_parallel: bool,
        attend: Attend,
        whole: WholeStream,
        dropping: DroppingAttention | None = None,
        gemm: Gemm = PLAIN,
    ):
        super().__init__()
        spec, mla = block.attention, block.attention.latent
        assert mla is not None
        options: TensorParallel = {"tp": tp, "sequence_parallel": sequence_parallel}
        inside: TensorParallel = {"tp": tp, "sequence_parallel": False}
        self.tp, self.enter = tp, gather_rows if sequence_parallel else copy_to
        self.num_heads = spec.num_heads // tp.size
        self.mla, self.window = mla, spec.window
        self.attend, self.whole, self.dropping = attend, whole, dropping
        self.turn, self.scale_query = Turn(spec), scaled_by(spec.query_scale)
        self.widths = [*([] if mla.q_lora_rank is None else [mla.q_lora_rank]), mla.kv_lora_rank, mla.qk_rope_head_dim]
        norm = NORM_OF_HEADS[NORMS[block.norm].of_heads]
        width = self.num_heads * spec.head_dim
        if mla.q_lora_rank is None:
            self.q = ColumnParallelLinear(hidden_size, width, gemm=gemm, **options)
        self.a = ReplicatedLinear(hidden_size, sum(self.widths), gemm=gemm, **options)
        if mla.q_lora_rank is not None:
            self.q_a_norm = norm(mla.q_lora_rank, block.norm_eps, **options)
            self.q_b = ColumnParallelLinear(mla.q_lora_rank, width, has_all=True, gemm=gemm, **inside)
        self.kv_a_norm = norm(mla.kv_lora_rank, block.norm_eps, **options)
        of_heads = self.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        self.kv_b = ColumnParallelLinear(mla.kv_lora_rank, of_heads, has_all=True, gemm=gemm, **inside)
        self.o = RowParallelLinear(
            self.num_heads * mla.v_head_dim, hidden_size, bias=spec.output_bias, gemm=gemm, **options
        )

    def forward(self, x: Tensor, documents: Documents) -> Tensor:
        q, k, v = self.project(x, documents)
        attend, of_heads = attention_now(self.attend, self.dropping, q)
        return self.o(attend(q, k, v, documents, self.window, **of_heads).flatten(1))

    def project(self, x: Tensor, documents: Documents) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated and scaled queries `[t, n, nope + rope]`; keys of that width, and values `[s, n, value]`, of all s
        tokens that they may see."""
        *of_queries, of_keys, shared = self._latents(x)
        q = self._queries(self.q_b(of_queries[0]) if of_queries else self.q(x), documents)
        turned = self.turn(shared.unsqueeze(1), documents)
        return q, *self._keys_and_values(of_keys, turned.squeeze(1), documents)

    def _latents(self, x: Tensor) -> list[Tensor]:
        """Of queries, if they have one, and of keys, normalised, and the key that all heads share, of all tokens."""
        *of_queries, of_keys, shared = self.a(x).split(self.widths, dim=1)
        found = [*(self.q_a_norm(each) for each in of_queries), self.kv_a_norm(of_keys), shared]
        if self.tp.size == 1:
            return found
        return list(self.enter(torch.cat(found, dim=1), self.tp).split(self.widths, dim=1))

    def _queries(self, x: Tensor, documents: Documents) -> Tensor:
        heads = x.unflatten(1, (self.num_heads, -1))
        still, turning = heads.split((self.mla.qk_nope_head_dim, self.mla.qk_rope_head_dim), dim=2)
        return self.scale_query(torch.cat((still, self.turn(turning, documents)), dim=2))

    def _keys_and_values(self, latents: Tensor, shared: Tensor, documents: Documents) -> tuple[Tensor, Tensor]:
        """`shared` is `[t, rope]`."""
        rank, turning = latents.shape[1], shared.shape[1]
        latents, shared = self.whole(torch.cat((latents, shared), dim=1), documents).split((rank, turning), dim=1)
        widths = [self.num_heads * width for width in (self.mla.qk_nope_head_dim, self.mla.v_head_dim)]
        still, v = (each.unflatten(1, (self.num_heads, -1)) for each in self.kv_b(latents).split(widths, dim=1))
        k = torch.cat((still, shared.unsqueeze(1).expand(-1, self.num_heads, -1)), dim=2)
        return k, v.contiguous()  # else the view would keep the whole product until the backward pass
