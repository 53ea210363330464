"""A look into the layers every so many steps: norms of weights, gradients and updates, and what the blocks do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megalite.config.plan import RunPlan
from megalite.config.schema import Config
from megalite.data.loader import Batch
from megalite.engine.protocol import Engine, StepResult, make_update
from megalite.monitor.activations import Activations
from megalite.monitor.weight_norms import WeightNorms
from megalite.parallel.axes import Axes

Record = dict[str, dict[str, dict[str, float]]]
"""`layers` and `weights`, by name, by statistic."""


class LayerWatch:
    """Looks into an engine's layers at chosen steps. Every call is collective."""

    def __init__(self, engine: Engine, config: Config, plan: RunPlan, axes: Axes):
        self._engine, self._every = engine, config.monitor.layers_every
        self._norms = WeightNorms(engine, plan.model, axes, config.parallel.zero_stage)
        self._activations = Activations(engine.stage, axes, config.batch.seq_len)

    def watch(self, step: int, batches: Sequence[Batch], train: Callable[[], StepResult]) -> tuple[StepResult, Record]:
        """Run a training step, and look when its turn has come: at what the weights make of the batch, then at the
        update. The record is empty otherwise."""
        if self._every is None or step % self._every:
            return train(), {}
        layers: dict[str, dict[str, Any]] = self._activations.look(lambda: self._engine.eval_step(batches))
        self._engine.around_update = self._norms.around
        try:
            result = train()
        finally:
            self._engine.around_update = make_update
        norms = self._norms.collect(result.grad_norm)
        if norms is None:  # left out: there was no update
            return result, {"layers": layers, "weights": {}}
        weights, of_layers = norms
        return result, {
            "layers": {name: {**of_layers.get(name, {}), **layers.get(name, {})} for name in {**of_layers, **layers}},
            "weights": weights,
        }
