"""What a run remembers from one validation to the next: the best so far, and for how long there was no progress.

It travels in every checkpoint's progress, so that a restart neither forgets the best nor begins to wait anew.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from megalite.config.schema import EarlyStoppingConfig


@dataclass(frozen=True)
class ValidationTracker:
    """How the validations so far went."""

    best_loss: float | None = None
    """The lowest watched loss; None before the first validation."""
    best_step: int = 0
    num_without_progress: int = 0
    """Validations since the watched loss last fell by `early_stopping.min_delta`."""
    reference_loss: float | None = None
    """What the loss must fall below by `min_delta` to count as progress."""
    best_scores: dict[str, float] = field(default_factory=dict)
    """The highest accuracy of each task."""

    @classmethod
    def load(cls, saved: dict[str, Any]) -> ValidationTracker:
        """From a checkpoint's progress; empty for one that has none."""
        return cls(**saved)

    def saved(self) -> dict[str, Any]:
        """As a checkpoint keeps it; nothing before the first validation."""
        return {} if self == ValidationTracker() else asdict(self)

    def after_loss(self, step: int, loss: float, min_delta: float) -> ValidationTracker:
        """What is known after one more watched loss. A NaN is no progress."""
        is_finite = math.isfinite(loss)
        is_best = is_finite and (self.best_loss is None or loss < self.best_loss)
        is_progress = is_finite and (self.reference_loss is None or loss < self.reference_loss - min_delta)
        return replace(
            self,
            best_loss=loss if is_best else self.best_loss,
            best_step=step if is_best else self.best_step,
            num_without_progress=0 if is_progress else self.num_without_progress + 1,
            reference_loss=loss if is_progress else self.reference_loss,
        )

    def after_score(self, task: str, accuracy: float) -> ValidationTracker:
        """What is known after one more score of a task."""
        best = max(accuracy, self.best_scores.get(task, accuracy))
        return replace(self, best_scores={**self.best_scores, task: best})

    def reason_to_stop(self, early_stopping: EarlyStoppingConfig | None) -> str:
        """Why the run should end here; empty when it should go on."""
        if early_stopping is None or self.num_without_progress < early_stopping.patience:
            return ""
        best = "" if self.best_loss is None else f"; the lowest was {self.best_loss:.4f} at step {self.best_step}"
        return (
            f"the watched loss has not fallen by more than {early_stopping.min_delta:g} in "
            f"{self.num_without_progress} validations{best}"
        )
