"""The state of fp16's dynamic loss scaling, which DeepSpeed keeps in its optimizer and only its own checkpoints hold.

The scale doubles after a thousand good steps and is halved by gradients that overflow; that step is left out.
"""

from __future__ import annotations

from typing import Any

from megalite.engine.protocol import LossScaling

FIELDS = {
    "scale": "cur_scale",
    "num_steps": "cur_iter",
    "last_overflow": "last_overflow_iter",
    "overflows_to_bear": "cur_hysteresis",
}
"""Our names of what DeepSpeed's `DynamicLossScaler` has: the factor on the loss, steps so far, the last of them that
overflowed (-1 for none), and overflows left, this one counted, until the scale is halved."""


def stay_at_minimum(optimizer: Any) -> None:
    """Let a DeepSpeed optimizer's scale rest where it may not fall any more, where DeepSpeed would end the run."""
    if loss_scaling(optimizer):
        optimizer.loss_scaler.raise_error_at_min_scale = False


def loss_scaling(optimizer: Any) -> LossScaling:
    """The state of a DeepSpeed optimizer's scaler."""
    scaler = getattr(optimizer, "loss_scaler", None)
    if not getattr(scaler, "dynamic", False):
        return {}
    return {name: getattr(scaler, theirs) for name, theirs in FIELDS.items()}


def set_loss_scaling(optimizer: Any, state: LossScaling) -> None:
    """Go on from a state; nothing happens where nothing is scaled, as when a run in fp16 goes on in bf16."""
    if loss_scaling(optimizer):
        for name, value in state.items():
            setattr(optimizer.loss_scaler, FIELDS[name], value)
