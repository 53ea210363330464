"""Comparing the copies of weights every so many steps and before every save; see `train.replicas`."""

from __future__ import annotations

from typing import Any

from megalite.engine.protocol import StepResult
from megalite.monitor.recorder import Recorder
from megalite.train.components.component import Component, RollBack, Step
from megalite.train.replicas import Replicas

NUM_NAMED = 4
"""Drifted weights that a message names."""


class ReplicaCheck(Component):
    """Asks to go back when copies differ, so that none of them is saved.

    Args:
        every: steps between checks.
        first_step: steps done before this attempt.
    """

    name = "replica_check"

    def __init__(self, replicas: Replicas, recorder: Recorder, every: int, first_step: int):
        self._replicas, self._recorder, self._every = replicas, recorder, every
        self._equal_at = self._checked_at = first_step  # all ranks have read the same

    def after_step(self, step: Step, result: StepResult) -> RollBack | None:
        return self._compare(step.number) if step.number % self._every == 0 else None

    def before_save(self, step: int) -> RollBack | None:
        return self._compare(step) if step != self._checked_at else None

    def rewind(self, step: int, state: dict[str, Any]) -> None:
        self._equal_at = self._checked_at = step

    def _compare(self, step: int) -> RollBack | None:
        drifts = self._replicas.find_drift()
        self._checked_at = step
        if not drifts:
            self._equal_at = step
            return None
        why = "; ".join(map(str, drifts[:NUM_NAMED])) + ("; ..." if len(drifts) > NUM_NAMED else "")
        ranks = sorted({rank for drift in drifts for rank in drift.ranks})
        self._recorder.event("drift", step, why=why, ranks=ranks, weights=[drift.name for drift in drifts])
        return RollBack(self._equal_at + 1, f"copies of weights have drifted apart: {why}")
