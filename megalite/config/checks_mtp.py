"""What must hold where a model predicts further than the next token."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from megalite.architecture.architecture import Architecture
from megalite.config.plan import ends_apart
from megalite.config.schema import Config


def check_prediction(config: Config, model: Architecture) -> Iterator[str]:
    """Complaints about `model.mtp` and the rest of a run."""
    if model.mtp is not None and ends_apart(config.parallel):
        yield (
            "model.mtp: layers that predict further need embedding and head, which "
            f"schedule={config.parallel.schedule} has on two stages; use schedule=zb-v or dualpipe-v, which have "
            "both on the first, pp=1, or mtp=null"
        )


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
