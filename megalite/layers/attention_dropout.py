"""Dropout of attention's weights: each pair of a query and a key is dropped in each head by itself, behind softmax.

    o = (P x mask / (1 - rate)) v        mask: a hash of (seed, block, head, token of the query, token of the key)

The mask is a function of the tokens, as that of other dropout is (`parallel.random`), so every layout, recomputation
and a restart find it again. No kernel of torch's takes such a mask, so in training scores are spelled out, some queries
at a time (`attention.attend_spelled_out`); evaluation keeps its kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megalite.layers.attention import Attend
from megalite.parallel.axes import Axis
from megalite.parallel.random import name_seed, random_bits


class DroppingAttention(nn.Module):
    """The attention of a block in training, and the seeds of its heads.

    Args:
        attend: takes `head_seeds`.
        seed: of the run.
        site: of the block.
        num_heads: query heads of this rank.
    """

    def __init__(self, attend: Attend, *, seed: int, site: str, num_heads: int, tp: Axis):
        super().__init__()
        self.attend = attend
        self.seed = torch.tensor(name_seed(seed, site), device="cpu")  # as in `Dropout`: a tensor, and no buffer
        self.first_head, self.num_heads = tp.rank * num_heads, num_heads

    def head_seeds(self, device: torch.device) -> Tensor:
        """`[n]` int64, of this rank's query heads."""
        heads = torch.arange(self.first_head, self.first_head + self.num_heads, device=device)
        return random_bits(heads, self.seed, 63)


def attention_now(attend: Attend, dropping: DroppingAttention | None, x: Tensor) -> tuple[Attend, dict[str, Tensor]]:
    """How to attend now, in training or not, and what it is told of each head."""
    if dropping is None or not dropping.training:
        return attend, {}
    return dropping.attend, {"head_seeds": dropping.head_seeds(x.device)}
