"""The state of fp16's dynamic loss scaling, which DeepSpeed keeps in its optimizer and only its own checkpoints hold.

The scale doubles after a thousand good steps and is halved by gradients that overflow; that step is left out.
"""

from __future__ import annotations

from typing import Any

LossScaling = dict[str, float]
"""What a scaler remembers, equal on all ranks; empty where nothing is scaled."""

FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""Of DeepSpeed's `DynamicLossScaler`."""


def loss_scaling(optimizer: Any) -> LossScaling:
    """The state of a DeepSpeed optimizer's scaler."""
    scaler = getattr(optimizer, "loss_scaler", None)
    return {name: getattr(scaler, name) for name in FIELDS} if getattr(scaler, "dynamic", False) else {}


def set_loss_scaling(optimizer: Any, state: LossScaling) -> None:
    """Go on from a state; nothing happens where nothing is scaled, as when a run in fp16 goes on in bf16."""
    if loss_scaling(optimizer):
        for name, value in state.items():
            setattr(optimizer.loss_scaler, name, value)
