"""An engine that learns from pairs of answers, on top of any other.

    losses of tokens, by the model as it is      one forward pass
    losses of tokens, by the frozen reference    another
    their pairs' loss -> a weight for each token
    a training step on the weighted cross-entropy, whose gradient is that of the loss

So every layout and engine that trains with loss weights trains with pairs. The price is a forward pass of the model
that a fused loss would spare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from megalite.config.sections.train import PreferenceConfig
from megalite.data.loader import Batch
from megalite.engine.preference_loss import FIGURES, pair_loss
from megalite.engine.protocol import Ask, Engine, LossSum, StepResult, nothing
from megalite.parallel.axes import Axis
from megalite.parallel.collectives import all_reduce


class FrozenModel(Protocol):
    """A model that stays as it was."""

    def token_losses(self, batches: Sequence[Batch]) -> list[Tensor]:
        """See `Engine.token_losses`."""
        ...


class WithoutAdapters:
    """The reference of a model with low-rank adapters: itself without them, which takes no memory."""

    def __init__(self, engine: Engine):
        self._engine = engine

    def token_losses(self, batches: Sequence[Batch]) -> list[Tensor]:
        with self._engine.stage.without_adapters():
            return self._engine.token_losses(batches)


class PreferenceEngine:
    """See `engine.protocol.Engine`; all that is not said here is the other engine's.

    Args:
        engine: that trains.
        batch_axis: the ranks that have other micro-batches.
    """

    def __init__(self, engine: Engine, reference: FrozenModel, settings: PreferenceConfig, batch_axis: Axis):
        self._engine, self._reference = engine, reference
        self._settings, self._batch_axis = settings, batch_axis

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def clip_norm(self) -> float | None:
        return self._engine.clip_norm

    @clip_norm.setter
    def clip_norm(self, norm: float | None) -> None:
        self._engine.clip_norm = norm

    def train_step(self, batches: Sequence[Batch], lr: float, ask: Ask = nothing) -> StepResult:
        weighed, figures = self._weigh(batches)
        result = self._engine.train_step(weighed, lr, ask)
        pairs = figures.pop("pairs")
        loss, *others = (each / pairs if pairs else float("nan") for each in figures.values())
        return replace(result, loss=loss, figures=dict(zip(list(figures)[1:], others, strict=True)))

    def eval_step(self, batches: Sequence[Batch]) -> LossSum:
        _, figures = self._weigh(batches)
        return LossSum(figures["loss"], int(figures["pairs"]), figures["pairs"])

    def _weigh(self, batches: Sequence[Batch]) -> tuple[list[Batch], dict[str, float]]:
        """The micro-batches with the weights that their pairs' loss gives each token, and the figures of the global
        batch, added up. Collective."""
        own, theirs = (source.token_losses(batches) for source in (self._engine, self._reference))
        found = [pair_loss(*each, self._settings) for each in zip(batches, own, theirs, strict=True)]
        sums = all_reduce(torch.stack([each.sums for each in found]).sum(0), self._batch_axis).tolist()
        pairs = FIGURES.index("pairs")
        weighed = [
            replace(batch, weights=each.weights, pairs=each.sums[pairs])
            for batch, each in zip(batches, found, strict=True)
        ]
        return weighed, dict(zip(FIGURES, sums, strict=True))
