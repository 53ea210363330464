"""The router of a sparse block: which experts each token goes to, with which weights, and how they are kept in balance.

    logits = x W^T + b  -> scores (softmax or sigmoid) -> the best k of scores + bias -> their scores, normalised or not

All of it is in fp32 at least. Balance comes from a bias that counts in the choice alone and moves once a step (Wang et
al. 2024), or from losses that only training minimises: their gradients are added to those of the weights, and no loss
that is reported has them in it (`_Beside`). They are sums over the tokens that count, each with its weight in the loss,
so that they are means over the global batch in any layout.

How often each expert was chosen, and had no room, is noted in the backward pass, of which there is one for each token,
whatever is done again for it.

Legend: t tokens of this rank, h hidden size, e experts, k chosen ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.architecture.settings import MoeConfig
from megalite.layers import opaque
from megalite.layers.capacity import find_room
from megalite.layers.documents import Documents
from megalite.parallel.axes import SINGLE, Axis
from megalite.parallel.collectives import keep, own_rows, reduce_from, replicated


class Routing(NamedTuple):
    """Where tokens go."""

    chosen: Tensor
    """`[t, k]` int64, experts, the best first."""
    weights: Tensor
    """`[t, k]` fp32 at least, with gradients; 0 of choices that were dropped."""
    kept: Tensor | None = None
    """`[t, k]` bool: which choices found room at their expert; None where all do."""


class Router(nn.Module):
    """Chooses the experts of each token. Shape: `[t, h]` (`[t/tp, h]` when sequence parallel) -> `Routing` of as many.

    Args:
        cp: the ranks that share the tokens of a micro-batch.
    """

    def __init__(self, hidden_size: int, settings: MoeConfig, *, tp: Axis, sequence_parallel: bool, cp: Axis = SINGLE):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(settings.num_experts, hidden_size))
        self.logit_bias = nn.Parameter(torch.empty(settings.num_experts)) if settings.logit_bias else None
        self.settings = settings
        self.tp, self.share = tp, replicated(sequence_parallel)
        self.own = own_rows if sequence_parallel else keep
        self._cp, self._rows = cp, tp if sequence_parallel else SINGLE
        # State, which is no parameter and does not follow the stage's format: see `layers.routers`
        self.bias: Tensor | None = None
        """`[e]` fp32."""
        self.loads: Tensor | None = None
        """`[e]` fp32: how often tokens that count chose each expert in the last step; None before the first."""
        self.dropped: Tensor | None = None
        """`[e]` fp32: how many of these choices found no room; None where there is room for all."""
        self.noted = self.nothing_noted()
        """Both, of this rank so far: `[1 or 2, e]`. This and the others stay where they are from step to step."""
        self._number = opaque.number_of(self)

    def forward(self, x: Tensor, documents: Documents | None = None) -> Routing:
        logits = self._logits(x)
        scores = self._of_logits(logits)
        bias = None if self.bias is None else self.bias.to(scores.device)
        chosen = choose(scores.detach(), bias, self.settings)
        weights = scores.gather(1, chosen)
        if self.settings.normalize:
            weights = weights / weights.sum(1, keepdim=True)
        if self.settings.scale != 1.0:
            weights = weights * self.settings.scale
        if not self.training or documents is None or documents.loss_weights is None:
            return Routing(chosen, weights)
        kept = None
        if self.settings.capacity_factor is not None:
            kept = find_room(chosen, weights, documents, self.settings, rows=self._rows, cp=self._cp)
            weights = weights.masked_fill(~kept, 0.0)
        routing = Routing(chosen, weights, kept)
        return routing._replace(weights=self._balance(logits, scores, routing, documents))

    def nothing_noted(self) -> Tensor:
        """What `noted` is when a step begins."""
        return torch.zeros(1 if self.settings.capacity_factor is None else 2, self.settings.num_experts)

    def scores(self, x: Tensor) -> Tensor:
        """`[t, e]`: of each expert, for who only looks on."""
        with torch.no_grad():
            return self._of_logits(self._logits(x))

    def counted(self, documents: Documents) -> Tensor:
        """`[t]` bool: which of this rank's tokens count in the loss."""
        assert documents.loss_weights is not None
        return self.own(documents.loss_weights, self.tp) > 0

    def _logits(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        bias = None if self.logit_bias is None else self.share(self.logit_bias, self.tp).to(wide)
        return F.linear(x.to(wide), self.share(self.weight, self.tp).to(wide), bias)

    def _of_logits(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1) if self.settings.scores == "softmax" else logits.sigmoid()

    def _balance(self, logits: Tensor, scores: Tensor, routing: Routing, documents: Documents) -> Tensor:
        """The weights, from which a backward pass begins at the losses beside too, and notes what was chosen."""
        assert documents.loss_weights is not None
        weights, settings = self.own(documents.loss_weights, self.tp), self.settings
        counted = self.counted(documents).unsqueeze(1).expand_as(routing.chosen).float()
        loss = logits.new_zeros(())
        if settings.aux_loss:
            means = scores if settings.scores == "softmax" else scores / scores.sum(1, keepdim=True)
            shares = self._shares(routing.chosen, counted, documents)
            loss = loss + settings.aux_loss * (weights.unsqueeze(1) * shares * means).sum()
        if settings.z_loss:
            loss = loss + settings.z_loss * (weights * logits.logsumexp(1).square()).sum()
        counts = self._count(routing.chosen, counted, 1)
        if routing.kept is not None:
            counts = torch.cat((counts, self._count(routing.chosen, counted * ~routing.kept, 1)))
        return _Beside.apply(routing.weights, loss, counts, self._number)

    def _shares(self, chosen: Tensor, counted: Tensor, documents: Documents) -> Tensor:
        """`[t or 1, e]`: N f of the balancing loss, of the tokens that a token is counted with. 1 where even."""
        num_experts = self.settings.num_experts
        if self.settings.aux_loss_over == "global_batch":
            even = torch.ones(num_experts, device=chosen.device)
            return _even_is_one((even if self.loads is None else self.loads).unsqueeze(0))
        places, num_units = None, 1
        if self.settings.aux_loss_over == "sequence":
            places, num_units = self.own(documents.sequences, self.tp), documents.num_sequences
        with torch.no_grad():
            counts = self._count(chosen, counted, num_units, places)
            for axis in (self._cp, self._rows):
                counts = reduce_from(counts, axis)
        shares = _even_is_one(counts)
        return shares if places is None else shares[places]

    def _count(self, chosen: Tensor, counted: Tensor, num_units: int, places: Tensor | None = None) -> Tensor:
        """`[units, e]` fp32: how often each expert was chosen."""
        num_experts = self.settings.num_experts
        cells = chosen if places is None else chosen + num_experts * places.unsqueeze(1)
        counts = torch.zeros(num_units * num_experts, device=chosen.device)
        return counts.index_add(0, cells.flatten(), counted.flatten()).view(num_units, num_experts)


def choose(scores: Tensor, bias: Tensor | None, settings: MoeConfig) -> Tensor:
    """`[t, k]`: the experts of each token, the best first.

    With groups those of the best ones only. A group is as good as its best expert (DeepSeek-V2), or as its best two
    together (DeepSeek-V3).
    """
    ranked = scores if bias is None else scores + bias
    if settings.top_groups < settings.num_groups:
        grouped = ranked.unflatten(1, (settings.num_groups, -1))
        two = min(2, grouped.shape[2]) if settings.group_score == "sum_of_two" else 1
        best = grouped.topk(two, dim=2).values.sum(2).topk(settings.top_groups, dim=1).indices
        is_out = torch.ones_like(grouped[:, :, 0], dtype=torch.bool).scatter(1, best, False)
        ranked = grouped.masked_fill(is_out.unsqueeze(2), -torch.inf).flatten(1)
    return ranked.topk(settings.top_k, dim=1).indices


def _even_is_one(counts: Tensor) -> Tensor:
    """Counts of each row over their mean there; a row of none is even."""
    mean = counts.mean(1, keepdim=True)
    return torch.where(mean > 0, counts / mean.clamp(min=torch.finfo(counts.dtype).tiny), 1.0)


class _Beside(torch.autograd.Function):
    """Numbers as they are; their backward pass is one of a loss too, and notes counts once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, counts: Tensor, number: Tensor) -> Tensor:
        ctx.save_for_backward(counts, number)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return _note(grad, *ctx.saved_tensors), grad.new_ones(()), None, None


@torch.library.custom_op("megalite::note", mutates_args=())
def _note(grad: Tensor, counts: Tensor, number: Tensor) -> Tensor:
    """An op, so that a compiled block does it as well; it hands on a gradient, or the compiler would leave it out."""
    router = opaque.layer_of(number, Router)
    if router.noted.device != counts.device:
        router.noted = router.noted.to(counts.device)
    router.noted += counts
    return grad.clone()


@_note.register_fake
def _(grad: Tensor, counts: Tensor, number: Tensor) -> Tensor:
    return torch.empty_like(grad)
