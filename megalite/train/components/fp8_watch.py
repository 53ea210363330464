"""Watching FP8 in a run: every so many steps each layer and the whole model are measured, and layers go back.

    before the step   layers begin to measure
    after the step    each layer's errors, gathered from all ranks; the loss of a micro-batch in FP8 and unrounded (the
                      shadow); layers beyond `fallback_error` at two measurements in a row go back to `dtype`

All ranks decide from the same numbers. Measurements are lines of `fp8.jsonl`; a layer that goes back is an event, and
is kept in checkpoints.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megalite.data.loader import Batch
from megalite.engine.protocol import Engine, StepResult
from megalite.layers.fp8.watch import LayerErrors
from megalite.monitor.recorder import Recorder
from megalite.monitor.records import JsonLines, drop_steps_after
from megalite.parallel.axes import Axes
from megalite.parallel.collectives import from_all
from megalite.train.components.component import Component, Step

FP8_FILE = "fp8.jsonl"


class Fp8Watch(Component):
    """Measures every so many steps, and lets layers go back.

    Args:
        engine: whose stage is in FP8.
        fallback_error: beyond which a layer goes back; None for never.
        dtype: to what.
        path: of fp8.jsonl.
        every: steps.
    """

    name = "fp8_watch"

    def __init__(
        self,
        engine: Engine,
        *,
        fallback_error: float | None,
        dtype: str,
        axes: Axes,
        device: torch.device,
        recorder: Recorder,
        path: Path,
        every: int,
    ):
        from megalite.layers.fp8.precision import Fp8  # for runs in FP8 alone: 20 ms

        precision = engine.stage.precision
        assert isinstance(precision, Fp8), "a run in FP8"
        self._engine, self._axes, self._device = engine, axes, device
        self._precision = precision
        self._fallback_error, self._dtype = fallback_error, dtype
        self._recorder, self._path, self._every = recorder, path, every
        self._file: JsonLines | None = None

    def start_at(self, step: int) -> None:
        """Drop the lines of later steps, which will be done again."""
        if self._axes.global_rank:
            return
        self.close()
        drop_steps_after(self._path, step)
        self._file = JsonLines(self._path)

    def rewind(self, step: int, state: dict[str, Any]) -> None:
        self.start_at(step)

    def before_step(self, step: Step) -> None:
        """Begin to measure, if that is due at this step."""
        if step.number % self._every == 0:
            self._precision.begin_measuring(self._device)

    def after_step(self, step: Step, result: StepResult) -> None:
        """Write down what was measured, and let layers go back; a step that was left out says nothing of them."""
        if step.number % self._every:
            return
        axes, errors = self._axes, dict[str, LayerErrors]()
        for of_stage in from_all(self._precision.end_measuring(axes.tp, axes.replicas), axes.pp):
            errors |= of_stage
        self._write(step.number, errors, self._shadow(step.batches[0]))
        if result.skipped:
            return
        for gone in from_all(self._precision.retire_worst(errors, step.number), axes.pp):
            for name in gone:
                why = f"error {errors[name].worst:.3g} twice in a row, allowed is {self._fallback_error:g}"
                self._recorder.event("fp8_given_up", step.number, layer=name, why=why)
                self._recorder.say(f"{name} goes back to {self._dtype}: {why}")

    def _shadow(self, batch: Batch) -> dict[str, float]:
        """The loss of a micro-batch in FP8 and unrounded."""
        losses = {"loss": self._loss(batch)}
        with self._precision.unrounded():
            losses["unrounded_loss"] = self._loss(batch)
        exact = losses["unrounded_loss"]
        return {**losses, "error": abs(losses["loss"] - exact) / abs(exact) if exact else 0.0}

    def _loss(self, batch: Batch) -> float:
        found = self._engine.eval_step([batch])
        return found.total / (found.weight or 1.0)

    def _write(self, step: int, errors: dict[str, LayerErrors], shadow: dict[str, float]) -> None:
        if self._file is None:
            return
        layers = {name: {"error": layer.error, **_operands(layer)} for name, layer in errors.items()}
        self._file.write({"step": step, "shadow": shadow, "layers": layers})
        if not errors:
            return
        every = [operand for layer in errors.values() for operand in layer.operands.values()]
        worst = {
            "shadow_error": shadow["error"],
            "worst_layer_error": max(layer.worst for layer in errors.values()),
            "most_underflow": max((operand.underflow for operand in every), default=0.0),
            "most_saturation": max((operand.saturation for operand in every), default=0.0),
        }
        self._recorder.scalars(step, worst, "fp8")

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _operands(errors: LayerErrors) -> dict[str, Any]:
    return {role: asdict(operand) for role, operand in errors.operands.items()}
