"""Statistics of one step's layers: norms of weights, gradients and updates, and what the blocks do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megalite.architecture.architecture import Architecture
from megalite.data.loader import Batch
from megalite.engine.protocol import Engine, StepResult
from megalite.monitor.activations import Activations
from megalite.monitor.weight_norms import WeightNorms
from megalite.parallel.axes import Axes

Record = dict[str, dict[str, dict[str, float]]]
"""`layers` and `weights`, by name, by statistic."""


class LayerStatistics:
    """Measures one step at a time: `begin`, the step, `end`. Both are collective."""

    def __init__(self, engine: Engine, model: Architecture, axes: Axes, seq_len: int, most_queries: int | None):
        self._engine = engine
        self._norms = WeightNorms(engine, model, axes)
        self._activations = Activations(engine.stage, axes, seq_len, most_queries)
        self._layers: dict[str, dict[str, Any]] = {}
        self._stop_watching: Callable[[], None] = lambda: None

    def begin(self, batches: Sequence[Batch]) -> None:
        """See what the weights make of the step's batch, and wait for its update."""
        self._layers = self._activations.measure(lambda: self._engine.eval_step(batches))
        self._stop_watching = self._engine.hooks.around_update.add(self._norms.around)

    def end(self, result: StepResult) -> Record:
        """What was found; without weights where the step was left out."""
        self._stop_watching()
        norms = self._norms.collect(result.grad_norm)
        if norms is None:  # there was no update
            return {"layers": self._layers, "weights": {}}
        weights, of_layers = norms
        names = {**of_layers, **self._layers}
        return {
            "layers": {name: {**of_layers.get(name, {}), **self._layers.get(name, {})} for name in names},
            "weights": weights,
        }
