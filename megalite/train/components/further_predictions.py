"""Losses of predictions further ahead: how much they weigh in a step, and what they were.

metrics.jsonl    mtp_loss_1, mtp_loss_2, ...    of the layers that predict one, two tokens behind the next
"""

from __future__ import annotations

from megalite.architecture.settings import MtpConfig
from megalite.engine.protocol import Engine, StepResult
from megalite.train.components.component import Component, Step


class FurtherPredictions(Component):
    """Sets the weight of the step, and writes the losses down."""

    name = "further_predictions"

    def __init__(self, settings: MtpConfig, engine: Engine):
        self._settings, self._engine = settings, engine

    def before_step(self, step: Step) -> None:
        self._engine.stage.further.weight = self._settings.weight_at(step.number)

    def measure(self, step: Step, result: StepResult) -> None:
        step.figures |= {f"mtp_loss_{depth}": loss for depth, loss in enumerate(result.further, start=1)}
