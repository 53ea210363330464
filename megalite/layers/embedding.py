"""Token embedding with the vocabulary cut over tensor-parallel ranks (Shoeybi et al. 2019, section 3)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.architecture.weights import vocab_rows_per_rank
from megalite.layers.documents import Documents
from megalite.layers.weight_gradients import RowsGradient, TakeGradient
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
        self.take_gradient: TakeGradient | None = None
        """Gets the table's gradients, one a lookup; None leaves them to autograd."""

    @property
    def hands_over(self) -> bool:
        """Whether somebody else gets the table's gradients, row by row. Not on a GPU, which would add rows up in an
        order that chance decides; there autograd makes the whole gradient, in little time."""
        return self.take_gradient is not None and self.weight.device.type == "cpu"

    def forward(self, tokens: Tensor, documents: Documents) -> Tensor:
        local = tokens - self.first_row
        if self.tp.size == 1:
            x = self._look_up(local)
        else:
            here = (local >= 0) & (local < self.weight.shape[0])
            x = self._look_up(torch.where(here, local, 0)) * here.unsqueeze(1)
        x = self.leave(x, self.tp)
        if self.positions is not None:
            x = x + F.embedding(self.own(documents.positions, self.tp), self.share(self.positions, self.tp))
        return x

    def _look_up(self, rows: Tensor) -> Tensor:
        return _LookUp.apply(self.weight, rows, self) if self.hands_over else F.embedding(rows, self.weight)


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor, table: VocabParallelEmbedding) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.table = table
        return F.embedding(rows, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        (rows,), table = ctx.saved_tensors, ctx.table
        table.take_gradient(table.weight, RowsGradient(grad, rows, table.weight.shape[0]))
        return None, None, None
