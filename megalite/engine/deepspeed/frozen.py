"""Weights that stay as they are: their gradients are made zero before DeepSpeed adds them up and takes norms.

A parameter often fuses weights of which some are frozen, so they keep a gradient, and their rows of it are cleared.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from megalite.config.schema import OptimizerConfig
from megalite.config.weight_groups import group_of
from megalite.model.initialize import local_weights
from megalite.model.transformer import Stage


def clear_frozen(stage: Stage, optimizer: OptimizerConfig) -> None:
    """Have autograd clear the gradients of a stage's frozen weights from now on."""
    parameters, rows = dict(stage.named_parameters()), dict[str, list[slice]]()
    for local in local_weights(stage):
        group = group_of(local.weight.name, optimizer)
        if group is not None and group.frozen:
            found = slice(local.first_row, local.first_row + local.rectangle.shape[0])
            rows.setdefault(local.parameter_name, []).append(found)
    for name, frozen in rows.items():
        parameters[name].register_hook(_clearing(frozen))


def _clearing(rows: list[slice]) -> Callable[[Tensor], Tensor]:
    def clear(gradient: Tensor) -> Tensor:
        cleared = gradient.clone()
        for found in rows:
            cleared[found] = 0.0
        return cleared

    return clear
