"""Token embedding with the vocabulary cut over tensor-parallel ranks (Shoeybi et al. 2019, section 3)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.architecture.weights import vocab_rows_per_rank
from megalite.layers.documents import Documents
from megalite.parallel.axes import Axis
from megalite.parallel.collectives import keep, own_rows, reduce_from, replicated, scatter_rows


class VocabParallelEmbedding(nn.Module):
    """Rows of a table, each rank holding a run of them; the sum over ranks finds each token's row.

    Args:
        vocab_size: true vocabulary size; padding to whole runs is added here.
        hidden_size: width of a row.
        tp: the tensor-parallel axis.
        num_positions: rows of a learned position table, added to the token's row; None for none.
        sequence_parallel: the output is cut over tokens.

    Shape: tokens `[t]` -> `[t, hidden]` (or `[t/tp, hidden]` when sequence parallel).
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        tp: Axis,
        num_positions: int | None = None,
        sequence_parallel: bool = False,
    ):
        super().__init__()
        rows = vocab_rows_per_rank(vocab_size, tp.size)
        self.weight = nn.Parameter(torch.empty(rows, hidden_size))
        self.positions = None if num_positions is None else nn.Parameter(torch.empty(num_positions, hidden_size))
        self.first_row = rows * tp.rank
        self.tp = tp
        self.leave = scatter_rows if sequence_parallel else reduce_from
        self.own = own_rows if sequence_parallel else keep
        self.share = replicated(sequence_parallel)

    def forward(self, tokens: Tensor, documents: Documents) -> Tensor:
        local = tokens - self.first_row
        if self.tp.size == 1:
            x = F.embedding(local, self.weight)
        else:
            here = (local >= 0) & (local < self.weight.shape[0])
            x = F.embedding(torch.where(here, local, 0), self.weight) * here.unsqueeze(1)
        x = self.leave(x, self.tp)
        if self.positions is not None:
            x = x + F.embedding(self.own(documents.positions, self.tp), self.share(self.positions, self.tp))
        return x
