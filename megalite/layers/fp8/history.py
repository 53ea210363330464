"""Delayed scaling: scales from the maxima of former steps, so that a tensor is rounded without being looked at first.

    this step            recorded [layers, 3] <- maximum of every tensor, over micro-batches
    end of the step      recorded <- maximum over tp and replicas
                         history [layers, 3, h] <- recorded, then the h - 1 before it
                         scale = largest number of the format / maximum of the history / 2^margin

Transformer Engine does the same once a micro-batch; here it is once a step, so that scales do not depend on how a batch
is cut, and recording a maximum again, as recomputation does, changes nothing. A tensor without history, at the first
step or after training in bf16, is scaled by its own maximum; in Transformer Engine its first scale is 1, and gradients
below 1e-5 are lost.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.layers.fp8.quantise import largest
from megalite.layers.fp8.recipes import ROLES, Recipe, Role
from megalite.parallel.axes import Axis
from megalite.parallel.collectives import all_reduce


class Histories:
    """The maxima of all FP8 layers of a stage.

    Args:
        names: the layers.
        recipe: says the formats.
        length: steps that are remembered, h.
        most_recent: take the last step's maximum instead of the largest of all.
        margin: powers of two that are kept free above the maximum.
    """

    def __init__(
        self,
        names: list[str],
        recipe: Recipe,
        *,
        length: int,
        most_recent: bool,
        margin: int,
        device: torch.device,
    ):
        self.names = names
        self._most_recent = most_recent
        limits = [largest(recipe.formats[role]) / 2.0**margin for role in ROLES]
        self._limits = torch.tensor(limits, device=device)
        self.history = torch.zeros(len(names), len(ROLES), length, device=device)
        self.recorded = torch.zeros(len(names), len(ROLES), device=device)
        self.scale = torch.ones(len(names), len(ROLES), device=device)
        self.is_known = [False] * len(names)
        """Whether a layer has a history; else its tensors are scaled by themselves."""

    def record(self, layer: int, role: Role, amax: Tensor) -> None:
        """Note a tensor's maximum; doing so twice changes nothing."""
        place = self.recorded[layer, ROLES.index(role)]
        torch.maximum(place, amax.reshape(()), out=place)

    def scale_of(self, layer: int, role: Role) -> Tensor:
        """A tensor's scale in this step, `[1, 1]`."""
        return self.scale[layer, ROLES.index(role)].reshape(1, 1)

    def end_step(self, tp: Axis, replicas: Axis) -> None:
        """Take the step's maxima, of all ranks, into the history. Collective."""
        for axis in (tp, replicas):
            all_reduce(self.recorded, axis, dist.ReduceOp.MAX)
        newest = torch.where(self.recorded.isfinite(), self.recorded, 0.0)
        self.history = torch.cat((newest.unsqueeze(2), self.history[:, :, :-1]), dim=2)
        self.recorded.zero_()
        self.is_known = [True] * len(self.names)
        self._update_scales()

    def set_history(self, layer: int, history: Tensor | None) -> None:
        """Take up the history of a layer, `[3, any length]`, newest first; None to begin anew."""
        own = torch.zeros_like(self.history[layer])
        if history is not None:
            length = min(history.shape[1], own.shape[1])
            own[:, :length] = history[:, :length]
        self.history = self.history.clone()  # a save may still be reading what there was
        self.history[layer] = own
        self.recorded[layer] = 0.0
        self.is_known[layer] = history is not None
        self._update_scales()

    def _update_scales(self) -> None:
        amax = self.history[:, :, 0] if self._most_recent else self.history.amax(dim=2)
        self.scale = torch.where(amax > 0, self._limits / amax, 1.0)
