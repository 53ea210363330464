"""Validating when that is due, and what follows: events, the best so far, alarms, the end of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import nan
from typing import Any

from megalite.config.sections.evaluation import EarlyStoppingConfig
from megalite.engine.protocol import StepResult
from megalite.monitor.recorder import Recorder
from megalite.train.components.component import Component, Step
from megalite.train.evaluation.evaluator import Evaluator, Validation
from megalite.train.evaluation.scoring import Score
from megalite.train.evaluation.tasks import Task
from megalite.train.evaluation.tracker import ValidationTracker
from megalite.train.heartbeat import Heartbeat

Listener = Callable[[int, float], None]


class ValidateEvery(Component):
    """Validates every so many steps and at the end of the run.

    Args:
        every: steps; None for the end alone.
        early_stopping: when to end the run.
        tokens_at: what the run has read after a step, for an attempt that does none before it validates.
        listeners: told the step and the watched loss, which is the same on all ranks.
    """

    name = "validation"

    def __init__(
        self,
        evaluator: Evaluator,
        *,
        every: int | None,
        early_stopping: EarlyStoppingConfig | None,
        recorder: Recorder,
        heartbeat: Heartbeat,
        tokens_at: Callable[[int], int],
        listeners: Sequence[Listener] = (),
    ):
        self._evaluator, self._every, self._early_stopping = evaluator, every, early_stopping
        self._recorder, self._heartbeat, self._listeners = recorder, heartbeat, listeners
        self._tokens_at = tokens_at
        self.load_state({})

    def state(self) -> dict[str, Any]:
        return self._tracker.saved()

    def load_state(self, state: dict[str, Any]) -> None:
        self._tracker = ValidationTracker.load(state)
        self._last: tuple[int, Validation | None] = (-1, None)
        self._num_tokens: int | None = None

    def after_step(self, step: Step, result: StepResult) -> None:
        self._num_tokens = step.num_tokens_total
        if self._every is not None and step.number % self._every == 0:
            self._validate(step.number)

    def finish(self, step: int) -> None:
        if self._last[0] != step:
            self._validate(step)

    def stop_reason(self) -> str:
        return self._tracker.reason_to_stop(self._early_stopping)

    def loss_at(self, step: int) -> float | None:
        """The watched loss, if this very step was validated last."""
        at, found = self._last
        return found.watched.loss if at == step and found is not None and found.watched is not None else None

    def _validate(self, step: int) -> None:
        self._heartbeat.enter("validate", step)
        found = self._evaluator.validate()
        self._last = (step, found)
        self._recorder.validation(step, found.record())
        for task in self._evaluator.tasks:
            self._note_score(step, task, found.tasks[task.name])
        if found.watched is None:
            return
        num_tokens = self._num_tokens if self._num_tokens is not None else self._tokens_at(step)
        point = (step, num_tokens, self._deciding_loss(found))
        self._tracker = self._tracker.after_loss(point, found.watched.loss, self._early_stopping)
        for tell in self._listeners:
            tell(step, found.watched.loss)

    def _deciding_loss(self, found: Validation) -> float:
        """What the run is stopped by."""
        name = self._early_stopping.set if self._early_stopping is not None else None
        if name is None:
            return found.watched.loss if found.watched is not None else nan
        return found.sets[name].loss

    def _note_score(self, step: int, task: Task, found: Score) -> None:
        """Note a task's score, and raise the alarm when it has fallen far below its best."""
        best = self._tracker.best_scores.get(task.name, found.accuracy)
        if task.alarm_drop is not None and best - found.accuracy > task.alarm_drop:
            why = f"accuracy {found.accuracy:.4f} is {best - found.accuracy:.4f} below its best, {best:.4f}"
            self._recorder.event("score_alarm", step, task=task.name, accuracy=found.accuracy, best=best, why=why)
            self._recorder.say(f"ALARM at step {step}: {task.name}: {why}")
        self._tracker = self._tracker.after_score(task.name, found.accuracy)
