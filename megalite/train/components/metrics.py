"""Each step's line of metrics.jsonl, on the display and on the boards."""

from __future__ import annotations

from megalite.engine.protocol import StepResult
from megalite.monitor.recorder import Recorder
from megalite.train.components.component import Component, Step


class Metrics(Component):
    """Records every step."""

    name = "metrics"

    def __init__(self, recorder: Recorder):
        self._recorder = recorder

    def after_step(self, step: Step, result: StepResult) -> None:
        self._recorder.step(
            step.number,
            result,
            num_tokens=step.num_tokens,
            num_tokens_total=step.num_tokens_total,
            seconds=step.seconds,
            figures={**result.figures, **step.figures},
        )
