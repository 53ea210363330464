"""What must hold where a model predicts further than the next token."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from megalite.architecture.architecture import Architecture


def check_predictions(model: Architecture) -> Iterator[str]:
    """Complaints about a model's layers that predict further by themselves."""
    mtp = model.mtp
    if mtp is None:
        return
    if model.positions == "learned":
        yield "model.mtp: tokens further ahead have no rows in a table of positions; use positions=rope, or mtp=null"
    if model.mup is not None:
        yield "model.mup: no rule is known here for the matrix that joins two streams; use mup=null, or mtp=null"
    steps = [step for step, _ in mtp.loss_weight_steps]
    if any(later <= earlier for earlier, later in itertools.pairwise(steps)):
        yield f"model.mtp.loss_weight_steps: steps must rise, found {steps}"
