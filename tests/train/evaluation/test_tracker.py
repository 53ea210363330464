"""What counts as progress, when a run ends for want of it, and that a restart remembers."""

from __future__ import annotations

import json
from dataclasses import asdict

from megalite.checkpoint.format import Progress
from megalite.config.schema import EarlyStoppingConfig
from megalite.train.evaluation.tracker import ValidationTracker

NAN = float("nan")


def after(losses: list[float], min_delta: float = 0.0) -> ValidationTracker:
    """The standing after losses at steps 10, 20, ..."""
    standing = ValidationTracker()
    for number, loss in enumerate(losses, start=1):
        standing = standing.after_loss(10 * number, loss, min_delta)
    return standing


def test_patience_counts_validations_without_progress():
    """Two in a row above the best end a run with patience 2, not one, and a new best begins anew."""
    rule = EarlyStoppingConfig(patience=2)
    assert after([3.0, 2.0, 2.5]).reason_to_stop(rule) == ""
    assert after([3.0, 2.0, 2.5, 1.9, 2.0]).reason_to_stop(rule) == ""
    why = after([3.0, 2.0, 2.5, 2.0]).reason_to_stop(rule)
    assert "in 2 validations" in why
    assert "2.0000 at step 20" in why
    assert after([3.0, 2.0, 2.5, 2.0]).reason_to_stop(None) == ""


def test_small_steps_add_up():
    """A loss that creeps down by less than min_delta each time makes progress once the sum is enough; the best is the
    lowest all the same."""
    standing = after([1.0, 0.96, 0.93], min_delta=0.05)
    assert (standing.num_without_progress, standing.best_loss, standing.best_step) == (0, 0.93, 30)
    standing = after([1.0, 0.98, 0.96], min_delta=0.05)
    assert (standing.num_without_progress, standing.best_loss, standing.best_step) == (2, 0.96, 30)


def test_nan_is_no_progress_and_never_the_best():
    """A validation that is not finite counts as one without progress, first or later."""
    assert after([NAN, 2.0]).best_loss == 2.0
    assert after([2.0, NAN, NAN]).num_without_progress == 2
    assert "in 2 validations" in after([NAN, NAN]).reason_to_stop(EarlyStoppingConfig(patience=2))


def test_travels_in_a_checkpoint():
    """Through JSON and back it is the same; checkpoints without one, older ones among them, start empty."""
    standing = after([3.0, 2.5]).after_score("qa", 0.5).after_score("qa", 0.25)
    assert standing.best_scores == {"qa": 0.5}
    progress = Progress(
        **json.loads(json.dumps(asdict(Progress(step=20, components={"validation": standing.saved()}))))
    )
    assert ValidationTracker.load(progress.components["validation"]) == standing
    assert ValidationTracker.load({}) == ValidationTracker()
    assert ValidationTracker().saved() == {}
