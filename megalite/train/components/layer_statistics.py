"""Statistics of the layers every so many steps: norms of weights, gradients and updates, and what the blocks do."""

from __future__ import annotations

from megalite.engine.protocol import StepResult
from megalite.monitor.layers import LayerStatistics
from megalite.monitor.recorder import Recorder
from megalite.train.components.component import Component, Step


class LayerStatisticsEvery(Component):
    """Measures at chosen steps and writes layers.jsonl.

    Args:
        every: steps.
    """

    name = "layer_statistics"

    def __init__(self, statistics: LayerStatistics, recorder: Recorder, every: int):
        self._statistics, self._recorder, self._every = statistics, recorder, every

    def before_step(self, step: Step) -> None:
        if step.number % self._every == 0:
            self._statistics.begin(step.batches)

    def after_step(self, step: Step, result: StepResult) -> None:
        if step.number % self._every == 0:
            self._recorder.layers(step.number, self._statistics.end(result))
