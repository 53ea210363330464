"""What a run remembers from one validation to the next: the best so far, and how the loss has fallen.

    patience   validations since the loss last fell by `min_delta`
    slope      the fall of a line through the last losses (least squares), by steps or by tokens
    target     the last loss itself

It travels in every checkpoint's progress, so that a restart neither forgets the best nor begins to wait anew, and
decides as if there had been none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from megalite.config.schema import EarlyStoppingConfig, SlopeConfig

UNITS = {"1000-steps": (0, 1e3, "1000 steps"), "billion-tokens": (1, 1e9, "billion tokens")}
"""Which number of a point is counted, in what unit."""

Point = tuple[int, int, float]
"""Step, tokens of the run, loss."""


@dataclass(frozen=True)
class ValidationTracker:
    """How the validations so far went."""

    best_loss: float | None = None
    """The lowest watched loss; None before the first validation."""
    best_step: int = 0
    num_without_progress: int = 0
    """Validations since the loss that decides last fell by `early_stopping.min_delta`."""
    reference_loss: float | None = None
    """What it must fall below by `min_delta` to count as progress."""
    best_scores: dict[str, float] = field(default_factory=dict)
    """The highest accuracy of each task."""
    points: tuple[Point, ...] = ()
    """The last finite losses that decide, as many as the run's rule looks at."""

    @classmethod
    def load(cls, saved: dict[str, Any]) -> ValidationTracker:
        """From a checkpoint's progress; empty for one that has none."""
        points = tuple((step, tokens, loss) for step, tokens, loss in saved.get("points", ()))
        return cls(**{**saved, "points": points})

    def saved(self) -> dict[str, Any]:
        """As a checkpoint keeps it; nothing before the first validation."""
        if self == ValidationTracker():
            return {}
        return {**asdict(self), "points": [list(point) for point in self.points]}

    def after_loss(self, point: Point, watched: float, early_stopping: EarlyStoppingConfig | None) -> ValidationTracker:
        """What is known after one more validation. A NaN is no progress.

        Args:
            point: with the loss that decides when to stop.
            watched: the loss that decides which checkpoint is best.
        """
        step, _, loss = point
        is_finite = math.isfinite(loss)
        is_best = math.isfinite(watched) and (self.best_loss is None or watched < self.best_loss)
        min_delta = early_stopping.min_delta if early_stopping is not None else 0.0
        is_progress = is_finite and (self.reference_loss is None or loss < self.reference_loss - min_delta)
        return replace(
            self,
            best_loss=watched if is_best else self.best_loss,
            best_step=step if is_best else self.best_step,
            num_without_progress=0 if is_progress else self.num_without_progress + 1,
            reference_loss=loss if is_progress else self.reference_loss,
            points=self._with(point, early_stopping) if is_finite else self.points,
        )

    def after_score(self, task: str, accuracy: float) -> ValidationTracker:
        """What is known after one more score of a task."""
        best = max(accuracy, self.best_scores.get(task, accuracy))
        return replace(self, best_scores={**self.best_scores, task: best})

    def reason_to_stop(self, early_stopping: EarlyStoppingConfig | None) -> str:
        """Why the run should end here; empty when it should go on."""
        if early_stopping is None:
            return ""
        what = "the watched loss" if early_stopping.set is None else f"the loss on {early_stopping.set}"
        if early_stopping.target is not None and self.points and self.points[-1][2] <= early_stopping.target:
            step, _, loss = self.points[-1]
            return f"{what} is {loss:.4f} at step {step}, at or below the target of {early_stopping.target:g}"
        if early_stopping.slope is not None and (why := self._too_slow(early_stopping.slope)):
            return f"{what} {why}"
        if early_stopping.patience is None or self.num_without_progress < early_stopping.patience:
            return ""
        best = "" if self.best_loss is None else f"; the lowest was {self.best_loss:.4f} at step {self.best_step}"
        return (
            f"{what} has not fallen by more than {early_stopping.min_delta:g} in "
            f"{self.num_without_progress} validations{best}"
        )

    def _with(self, point: Point, early_stopping: EarlyStoppingConfig | None) -> tuple[Point, ...]:
        """The last points with another one; a step that is validated once more counts once."""
        if early_stopping is None:
            return ()
        kept = 1 if early_stopping.slope is None else early_stopping.slope.window
        return (*(each for each in self.points if each[0] < point[0]), point)[-kept:]

    def _too_slow(self, slope: SlopeConfig) -> str:
        points = self.points[-slope.window :]
        if len(points) < slope.window:
            return ""
        place, unit, said = UNITS[slope.per]
        fall = -fitted_slope([point[place] / unit for point in points], [point[2] for point in points])
        if fall >= slope.below:
            return ""
        return (
            f"falls by {fall:.4g} per {said}, as fitted to {len(points)} validations from step {points[0][0]} to "
            f"{points[-1][0]}, which is less than {slope.below:g}"
        )


def fitted_slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Of the line that is nearest to some points by the squares of its errors; x are not all the same."""
    middle, mean = math.fsum(x) / len(x), math.fsum(y) / len(y)
    covariance = math.fsum((a - middle) * (b - mean) for a, b in zip(x, y, strict=True))
    return covariance / math.fsum((a - middle) ** 2 for a in x)
