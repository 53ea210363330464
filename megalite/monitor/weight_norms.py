"""Gradient, weight and update norms of every canonical weight, summed up from the slices that ranks hold.

An update is watched from both sides: before it the gradients are there, and the weights as they were; after it the
difference of the weights is the update itself, whatever the optimizer. Every number of the model lies on one rank, or
is counted on one, so one sum over all ranks gives the norms of the whole model, the same in every layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megalite.architecture.architecture import Architecture
from megalite.architecture.weights import weight_table
from megalite.engine.protocol import Engine
from megalite.parallel.axes import Axes
from megalite.parallel.collectives import all_reduce

STATISTICS = ("grad_norm", "weight_norm", "update_norm")

Norms = dict[str, dict[str, float]]
"""By weight or layer: `grad_norm`, `weight_norm`, and `update_ratio`, the update's norm over the weight's."""


class WeightNorms:
    """Watches single updates of an engine."""

    def __init__(self, engine: Engine, model: Architecture, axes: Axes):
        self._engine, self._axes = engine, axes
        self._layer_of = {name: weight.layer for name, weight in weight_table(model).items()}
        self._index_of = {name: number for number, name in enumerate(self._layer_of)}
        self._device = next(engine.stage.parameters()).device
        self._squares: Tensor | None = None

    def around(self, update: Callable[[], None]) -> None:
        """Make an update and measure it: for `Engine.hooks`. Keeps a copy of this rank's slices meanwhile, in
        host memory."""
        gradients = self._engine.gradients()
        if not gradients:  # dropped, since they were not finite
            update()
            return
        chosen = [number for number, part in enumerate(self._engine.slices()) if not part.is_copy]
        weights = [self._engine.slices()[number].tensors["weight"] for number in chosen]
        gradient_norms = self._norms([gradients[number] for number in chosen])
        former = [weight.detach().to("cpu", copy=True) for weight in weights]
        weight_norms = self._norms(weights)
        update()
        changes = (weight.detach().cpu().float() - old.float() for weight, old in zip(weights, former, strict=True))
        update_norms = self._norms([torch.linalg.vector_norm(change) for change in changes])
        names = [self._engine.slices()[number].local.weight.name for number in chosen]
        self._squares = self._gather(names, (gradient_norms, weight_norms, update_norms))

    def collect(self, grad_norm: float) -> tuple[Norms, Norms] | None:
        """The norms of the watched update, by weight and by layer; None when it was left out. Collective.

        Args:
            grad_norm: of the whole model before clipping; gradients reach the update clipped, and are scaled back.
        """
        if self._squares is None:
            return None
        squares, self._squares = all_reduce(self._squares, self._axes.world).cpu(), None
        total = squares[:, 0].sum().sqrt().item()
        squares[:, 0] *= (grad_norm / total) ** 2 if total > 0.0 else 1.0
        layers = list(dict.fromkeys(self._layer_of.values()))
        of_layers = torch.zeros(len(layers), len(STATISTICS), dtype=torch.float64)
        of_layers.index_add_(0, torch.tensor([layers.index(layer) for layer in self._layer_of.values()]), squares)
        return _named(list(self._layer_of), squares), _named(layers, of_layers)

    def _norms(self, tensors: list[Tensor]) -> Tensor:
        """L2 norms, fp32 [n]."""
        norms = torch._foreach_norm(tensors, dtype=torch.float32) if tensors else ()
        return torch.tensor([], device=self._device) if not norms else torch.stack(norms).to(self._device)

    def _gather(self, names: Sequence[str], columns: Sequence[Tensor]) -> Tensor:
        """Squares of this rank's norms: fp64 [weights, 3]."""
        squares = torch.zeros(len(self._index_of), len(STATISTICS), dtype=torch.float64, device=self._device)
        rows = torch.tensor([self._index_of[name] for name in names], dtype=torch.int64, device=self._device)
        return squares.index_add_(0, rows, torch.stack(list(columns), dim=1).to(torch.float64).square())


def _named(names: list[str], squares: Tensor) -> Norms:
    found = {}
    for name, (gradient, weight, update) in zip(names, squares.sqrt().tolist(), strict=True):
        ratio = update / weight if weight > 0.0 else 0.0
        found[name] = {"grad_norm": gradient, "weight_norm": weight, "update_ratio": ratio}
    return found
