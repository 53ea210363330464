"""What counts as progress, when a run ends for want of it, and that a restart remembers."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest

from megalite.checkpoint.format import Progress
from megalite.config.schema import Config, EarlyStoppingConfig
from megalite.errors import ConfigError
from megalite.train.evaluation.tracker import ValidationTracker, fitted_slope

NAN = float("nan")


TOKENS_A_STEP = 2_000_000


def after(losses: list[float], min_delta: float = 0.0, **rule: object) -> ValidationTracker:
    """The standing after losses at steps 10, 20, ..., which goes through a checkpoint behind each."""
    standing, stopping = ValidationTracker(), EarlyStoppingConfig(min_delta=min_delta, **rule)
    for number, loss in enumerate(losses, start=1):
        point = (10 * number, 10 * number * TOKENS_A_STEP, loss)
        standing = standing.after_loss(point, loss, stopping)
        standing = ValidationTracker.load(json.loads(json.dumps(standing.saved())))
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


def test_a_slope_is_that_of_least_squares():
    """The slope of numpy's polynomial of degree one, of random points."""
    rng = np.random.default_rng(0)
    for size in (3, 8, 50):
        x, y = np.sort(rng.normal(size=size)), rng.normal(size=size)
        assert fitted_slope(x.tolist(), y.tolist()) == pytest.approx(np.polyfit(x, y, 1)[0])


@pytest.mark.parametrize(
    ("per", "below", "stops"),
    [
        ("1000-steps", 9.9, False),
        ("1000-steps", 10.1, True),
        ("billion-tokens", 4.9, False),
        ("billion-tokens", 5.1, True),
    ],
)
def test_a_run_ends_when_the_loss_falls_too_slowly(per: str, below: float, stops: bool):
    """A loss that falls by 0.1 every 10 steps of two million tokens falls by 10 in 1000 steps and by 5 in a billion
    tokens; a faster fall before the window does not count, nor is anything decided before the window is full."""
    slope = {"below": below, "per": per, "window": 4}
    rule = EarlyStoppingConfig(patience=None, slope=slope)
    losses = [50.0, 20.0, 3.0, 2.9, 2.8, 2.7]
    assert bool(after(losses, slope=slope, patience=None).reason_to_stop(rule)) is stops
    assert after(losses[2:5], slope=slope, patience=None).reason_to_stop(rule) == ""
    assert after([*losses, NAN], slope=slope, patience=None).points == after(losses, slope=slope, patience=None).points
    rising = after([1.0, 1.1, 1.2, 1.3], slope=slope, patience=None)
    assert "falls by -" in rising.reason_to_stop(rule)


def test_a_run_ends_at_its_target():
    """At it or below it, by the last loss alone, whatever patience says."""
    rule = EarlyStoppingConfig(target=2.0)
    assert after([2.5, 2.1], target=2.0).reason_to_stop(rule) == ""
    assert "is 2.0000 at step 20, at or below the target of 2" in after([2.5, 2.0], target=2.0).reason_to_stop(rule)
    assert after([1.9, 2.5], target=2.0).reason_to_stop(rule) == ""


def test_a_set_of_its_own_decides():
    """What the run is stopped by is another loss than the one its best checkpoint is chosen by."""
    rule = EarlyStoppingConfig(patience=1, set="code")
    standing = ValidationTracker().after_loss((10, 0, 3.0), 2.0, rule).after_loss((20, 0, 3.5), 1.0, rule)
    assert (standing.best_loss, standing.best_step, standing.num_without_progress) == (1.0, 20, 1)
    assert standing.reason_to_stop(rule).startswith("the loss on code has not fallen")


def test_older_checkpoints_are_read():
    """Of runs before losses were remembered."""
    saved = {"best_loss": 2.0, "best_step": 5, "num_without_progress": 1, "reference_loss": 2.0, "best_scores": {}}
    assert ValidationTracker.load(saved).points == ()


def test_a_window_holds_a_line():
    with pytest.raises(ConfigError, match="window"):
        Config(train={"early_stopping": {"slope": {"below": 0.1, "window": 2}}})
