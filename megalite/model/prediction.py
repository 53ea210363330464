"""Multi-token prediction (DeepSeek-V3, 2024, section 2.2): layers behind the model's last one that predict further.

    h_0 = the model's normalised stream, from which the head predicts t_(i+1)
    h_k = norm(block(projection(norm(embedding of t_(i+k)) | norm(h_(k-1)))))      the head predicts t_(i+k+1) from it

Embedding and head are the model's. Each layer sees the causal past alone, and the tokens that those before it were to
predict. Their losses are trained beside the model's own, which is what is reported; they are told by themselves.

Legend: t tokens of the stream, h hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megalite.layers.documents import Ahead, Documents
from megalite.layers.linear import ReplicatedLinear
from megalite.model.block import Block
from megalite.model.spec import StageSpec
from megalite.parallel.axes import TensorParallel

RunBlock = Callable[[Block, Tensor, Documents], Tensor]


class PredictionLayer(nn.Module):
    """One of them. Shape: `[t, h]`, or `[t/tp, h]` when sequence parallel.

    Args:
        depth: which, from 0.
    """

    def __init__(self, stage: StageSpec, depth: int):
        super().__init__()
        self.depth = depth
        model, hidden = stage.model, stage.model.hidden_size
        options: TensorParallel = {"tp": stage.tp, "sequence_parallel": stage.sequence_parallel}
        norm = partial(stage.parts.norm, hidden, model.norm_eps, **options)
        self.embedding_norm, self.hidden_norm = norm(), norm()
        self.projection = ReplicatedLinear(2 * hidden, hidden, gemm=stage.parts.gemm, **options)
        self.block = Block(stage, model.num_layers + depth)
        self.norm = norm()

    def forward(self, stream: Tensor, embedded: Tensor, documents: Documents, run: RunBlock) -> Tensor:
        """The next stream.

        Args:
            stream: of the layer before.
            embedded: the tokens that it was to predict.
            run: how blocks are run.
        """
        both = torch.cat((self.embedding_norm(embedded), self.hidden_norm(stream)), dim=-1)
        return self.norm(run(self.block, self.projection(both), documents))


class Further:
    """Predictions further ahead, in a stage that has embedding and head.

    Args:
        layers: first to last.
        weight: of the mean of their losses beside the model's own, until somebody sets another.
    """

    def __init__(self, layers: Sequence[PredictionLayer], weight: float):
        self._layers, self.weight = layers, weight
        self._sums: Tensor | None = None

    def beside(
        self,
        loss: Tensor,
        stream: Tensor,
        ahead: Sequence[Ahead],
        run: Callable[[PredictionLayer, Tensor, Ahead], Tensor],
        loss_of: Callable[[Tensor, Ahead], Tensor],
    ) -> Tensor:
        """The loss as it is, whose backward pass is one of these losses too.

        Args:
            loss: the model's own.
            stream: the model's, normalised.
            ahead: what each layer is given and should predict.
            run: runs a layer, given the stream.
            loss_of: the head.
        """
        losses = []
        for layer, each in zip(self._layers, ahead, strict=True):
            stream = run(layer, stream, each)
            losses.append(loss_of(stream, each))
        found = torch.stack([each.detach() for each in losses]).float()
        self._sums = found if self._sums is None else self._sums + found
        return _BesideLoss.apply(self.weight / len(losses), loss, *losses)

    def take_sums(self) -> Tensor | None:
        """The losses since they were last taken, each weighed as the model's own, `[layers]` fp32; None where this
        stage has made none."""
        found, self._sums = self._sums, None
        return found


class _BesideLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: float, loss: Tensor, *others: Tensor) -> Tensor:
        ctx.weight = weight
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        others = len(ctx.needs_input_grad) - 2
        return None, grad, *([grad * ctx.weight] * others)
