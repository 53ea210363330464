"""Losses over pairs of answers, of which people prefer the first: direct preference optimisation and its kin.

With w the weights of an answer's tokens, and log-probabilities of the model that is trained and of a frozen reference:

    reward of an answer    r = sum w (log p - log p_reference)
    margin of a pair       h = r(chosen) - r(rejected)

    sigmoid   -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)     DPO (Rafailov et al. 2023), with e cDPO
    hinge     max(0, 1 - beta h)                                        SLiC (Zhao et al. 2023)
    ipo       (h - 1 / (2 beta))^2, rewards being means over tokens     IPO (Azar et al. 2023)

    + chosen_nll x mean cross-entropy of the chosen answer              as Llama 3 was trained (Dubey et al. 2024)

A loss is a function of the tokens' cross-entropies alone, so its gradient is that of a weighted cross-entropy, each
token's weight being the derivative by its own. Engines need know no more than that.

Legend: t tokens of a micro-batch, n answers at most, two for each pair, in their order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.config.sections.train import PreferenceConfig
from megalite.data.loader import Batch

MarginLoss = Callable[[Tensor, PreferenceConfig], Tensor]


class PairLoss(NamedTuple):
    """What a micro-batch's pairs cost, fp64 but for the weights."""

    weights: Tensor
    """`[t]` fp32: the derivative of the loss by each token's cross-entropy."""
    sums: Tensor
    """`[len(FIGURES)]`: over the pairs."""


FIGURES = ("pairs", "loss", "accuracy", "chosen_reward", "rejected_reward")
"""What is added up: pairs, their losses, those with a margin above 0, and beta x the rewards."""


def pair_loss(batch: Batch, losses: Tensor, reference: Tensor, settings: PreferenceConfig) -> PairLoss:
    """The loss of a micro-batch's pairs, whose documents are chosen and rejected answers in turn.

    Args:
        losses: `[t]` fp32, each token's cross-entropy.
        reference: `[t]` fp32, by the reference.
    """
    answers = _answers_of_tokens(batch)
    assert batch.weights is not None, "packed pairs have weights"
    with torch.enable_grad():
        own = losses.detach().double().requires_grad_()
        sums, total = _sums(batch, answers, own, reference.double(), settings)
        (gradient,) = torch.autograd.grad(total, own)
    return PairLoss(gradient.float(), sums.detach())


def _answers_of_tokens(batch: Batch) -> Tensor:
    """`[t]` int64: which answer each token is learnt in, -1 for all others. Nothing waits for it."""
    places = torch.arange(batch.tokens.shape[0], device=batch.tokens.device, dtype=batch.cu_seqlens.dtype)
    documents = torch.bucketize(places, batch.cu_seqlens[1:], right=True)
    learnt = batch.loss_mask.long()
    counts = learnt.new_zeros(batch.cu_seqlens.shape[0]).index_add_(0, documents, learnt)
    numbers = (counts > 0).long().cumsum(0) - 1
    return torch.where(batch.loss_mask, numbers[documents], -1)


def _sums(
    batch: Batch, answers: Tensor, losses: Tensor, reference: Tensor, settings: PreferenceConfig
) -> tuple[Tensor, Tensor]:
    """The figures, and the loss over all pairs, differentiable by the tokens' losses."""
    assert batch.weights is not None
    num_answers = 2 * (batch.cu_seqlens.shape[0] // 2)
    places, own = answers.clamp(min=0), batch.weights.double() * batch.loss_mask
    empty = losses.new_zeros(num_answers + 2)
    of_answers = empty.index_add(0, places, own)
    is_there = of_answers[::2] > 0
    ratios = empty.index_add(0, places, own * (reference - losses))
    if settings.loss == "ipo":
        ratios = ratios / torch.where(of_answers > 0, of_answers, 1.0)
    chosen, rejected = ratios[::2], ratios[1::2]
    margins = chosen - rejected
    cost = LOSSES[settings.loss](margins, settings)
    if settings.chosen_nll:
        nll = empty.index_add(0, places, own * losses) / torch.where(of_answers > 0, of_answers, 1.0)
        cost = cost + settings.chosen_nll * nll[::2]
    figures = (torch.ones_like(cost), cost, (margins > 0).double(), settings.beta * chosen, settings.beta * rejected)
    found = torch.stack([torch.where(is_there, each, 0.0).sum() for each in figures])
    return found, found[FIGURES.index("loss")]


def _sigmoid(margins: Tensor, settings: PreferenceConfig) -> Tensor:
    smooth, scaled = settings.label_smoothing, settings.beta * margins
    return -(1.0 - smooth) * F.logsigmoid(scaled) - smooth * F.logsigmoid(-scaled)


def _hinge(margins: Tensor, settings: PreferenceConfig) -> Tensor:
    return F.relu(1.0 - settings.beta * margins)


def _ipo(margins: Tensor, settings: PreferenceConfig) -> Tensor:
    return (margins - 1.0 / (2.0 * settings.beta)).square()


LOSSES: dict[str, MarginLoss] = {"sigmoid": _sigmoid, "hinge": _hinge, "ipo": _ipo}
