"""Linear layers cut over tensor-parallel ranks (Shoeybi et al. 2019, section 3).

A column-parallel layer cuts its outputs, a row-parallel one its inputs; one after the other needs a single collective
each way. With sequence parallelism the stream outside the pair is cut by tokens instead of replicated, and the
collective becomes a gather and a scatter of the same traffic (Korthikanti et al. 2022).

    outside         column        inside          row           outside
    x [t, h]      -> copy_to    -> [t, out/tp] -> reduce_from  -> y [t, h]           plain
    x [t/tp, h]   -> gather     -> [t, out/tp] -> scatter_rows -> y [t/tp, h]        sequence parallel

Shapes are the local rank's: t tokens of the stream, h hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megalite.layers.gemm import PLAIN, LinearGemm
from megalite.layers.low_rank import LowRank
from megalite.layers.qat.learned import LearnedRounding
from megalite.parallel.axes import Axis, TensorParallel
from megalite.parallel.collectives import copy_to, gather_rows, keep, reduce_from, replicated, scatter_rows


class LinearOptions(TensorParallel, total=False):
    """What both kinds of linear layers are told."""

    bias: bool
    gemm: LinearGemm


class ColumnParallelLinear(nn.Module):
    """`y = x @ weight.T + bias`, outputs cut over tp.

    Args:
        in_features: whole input width.
        out_features: this rank's share of the outputs, out/tp.
        tp: the tensor-parallel axis.
        bias: add a bias of `[out/tp]`.
        sequence_parallel: the input is cut over tokens.
        has_all: somebody else has brought the whole input to all ranks, and adds up its gradient.
        gemm: how to multiply.

    Shape: `[t, in]` (or `[t/tp, in]` when sequence parallel) -> `[t, out/tp]`.
    """

    weight_cut = 0
    """The dim of the weight that tp divides."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp: Axis,
        bias: bool = False,
        sequence_parallel: bool = False,
        has_all: bool = False,
        gemm: LinearGemm = PLAIN,
    ):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.tp = tp
        self.enter = keep if has_all else gather_rows if sequence_parallel else copy_to
        self.gemm: LinearGemm = gemm
        self.lora: LowRank | None = None
        self.learned: LearnedRounding | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x, self.tp)
        y = self.gemm.linear(x, self.weight) if self.learned is None else self.learned(x, self.weight)
        y = y if self.lora is None else self.lora(x, y)
        return y if self.bias is None else y + self.bias


class RowParallelLinear(nn.Module):
    """`y = x @ weight.T + bias`, inputs cut over tp and the partial products summed.

    Args:
        in_features: this rank's share of the inputs, in/tp.
        out_features: whole output width.
        tp: the tensor-parallel axis.
        bias: add a bias of `[out]`, whole on every rank.
        sequence_parallel: the output is cut over tokens.
        leaves_parts: somebody else adds up what the ranks put out, and a bias would be added by each.
        gemm: how to multiply.

    Shape: `[t, in/tp]` -> `[t, out]` (or `[t/tp, out]` when sequence parallel).
    """

    weight_cut = 1
    """The dim of the weight that tp divides."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp: Axis,
        bias: bool = False,
        sequence_parallel: bool = False,
        leaves_parts: bool = False,
        gemm: LinearGemm = PLAIN,
    ):
        super().__init__()
        assert not (bias and leaves_parts), "one bias for each rank"
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.tp = tp
        self.share = replicated(sequence_parallel)
        self.leave = keep if leaves_parts else scatter_rows if sequence_parallel else reduce_from
        self.gemm: LinearGemm = gemm
        self.lora: LowRank | None = None
        self.learned: LearnedRounding | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.gemm.linear(x, self.weight) if self.learned is None else self.learned(x, self.weight)
        y = self.leave(y if self.lora is None else self.lora(x, y), self.tp)
        return y if self.bias is None else y + self.share(self.bias, self.tp)


class ReplicatedLinear(nn.Module):
    """`y = x @ weight.T`, all of it on every rank; each has its own tokens when sequence parallel.

    Shape: `[t, in]` -> `[t, out]` (`[t/tp, in]` -> `[t/tp, out]` when sequence parallel).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp: Axis,
        sequence_parallel: bool = False,
        gemm: LinearGemm = PLAIN,
    ):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.tp, self.share = tp, replicated(sequence_parallel)
        self.makes_partial_gradients = sequence_parallel and tp.size > 1
        """Its weight's gradient is summed over tp, by autograd: nobody else may take it before."""
        self.gemm: LinearGemm = gemm
        self.learned: LearnedRounding | None = None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.share(self.weight, self.tp)
        return self.gemm.linear(x, weight) if self.learned is None else self.learned(x, weight)


def handed_over(layer: ColumnParallelLinear | RowParallelLinear) -> list[nn.Parameter]:
    """The parameters whose gradients an engine gets from the layer's product, where it keeps their sums."""
    learned = layer.learned
    return [layer.weight, *([] if learned is None or not learned.hands_over[1] else [learned.scale])]
