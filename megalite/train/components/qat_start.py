"""Weights that are rounded from some step on (`precision.qat.start_step`). Nothing is kept: the step decides."""

from __future__ import annotations

from typing import Any

from megalite.engine.protocol import Engine
from megalite.monitor.recorder import Recorder
from megalite.train.components.component import Component, Step


class QatStart(Component):
    """Tells a stage which step comes.

    Args:
        engine: whose stage rounds its weights.
        start_step: the first step with rounded weights.
        done: steps done before this attempt.
    """

    name = "qat_start"

    def __init__(self, engine: Engine, recorder: Recorder, start_step: int, done: int):
        self._engine, self._recorder, self._start_step = engine, recorder, start_step
        begin_step(engine, done)

    def before_step(self, step: Step) -> None:
        if step.number == self._start_step:
            self._recorder.event("qat_begins", step.number)
            self._recorder.say(f"weights are rounded from step {step.number} on")
        begin_step(self._engine, step.number)

    def rewind(self, step: int, state: dict[str, Any]) -> None:
        begin_step(self._engine, step)


def begin_step(engine: Engine, number: int) -> None:
    """Tell a stage that rounds its weights which step comes."""
    from megalite.layers.qat.precision import Qat

    precision = engine.stage.precision
    assert isinstance(precision, Qat), "a run that rounds its weights"
    precision.begin_step(number)
