"""Watching FP8 in a run: every so many steps a look at each layer and at the whole model, and layers that go back.

    before the step   layers begin to measure
    after the step    each layer's look, gathered from all ranks; the loss of a micro-batch in FP8 and unrounded (the
                      shadow); layers beyond `fallback_error` at two looks in a row go back to `dtype`

All ranks decide from the same numbers. Looks are lines of `fp8.jsonl`; a layer that goes back is an event, and is kept
in checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megalite.data.loader import Batch
from megalite.layers.fp8.watch import LayerLook
from megalite.monitor.records import JsonLines, drop_steps_after
from megalite.parallel.axes import Axis

if TYPE_CHECKING:
    from megalite.layers.fp8.precision import Fp8
    from megalite.train.trainer import Run

LOOKS = "fp8.jsonl"


class NoWatch:
    """Looks at nothing."""

    def before(self, step: int) -> None:
        pass

    def after(self, step: int, batches: Sequence[Batch], *, is_skipped: bool) -> None:
        pass

    def rewind(self, step: int) -> None:
        pass

    def close(self) -> None:
        pass


class Fp8Watch:
    """Looks every `precision.fp8.watch_every` steps. Every method but `close` is collective.

    Args:
        run: with an engine whose stage is in FP8.
        first_step: steps done before this attempt; later lines of `fp8.jsonl` are dropped.
    """

    def __init__(self, run: Run, first_step: int):
        self._run = run
        self._precision: Fp8 = run.engine.stage.precision
        self._every = run.config.precision.fp8.watch_every
        self._file: JsonLines | None = None
        self.rewind(first_step)

    def rewind(self, step: int) -> None:
        """Drop the looks at later steps, which will be done again."""
        if self._run.axes.global_rank:
            return
        self.close()
        path = self._run.config.run.dir / LOOKS
        drop_steps_after(path, step)
        self._file = JsonLines(path)

    def before(self, step: int) -> None:
        """Begin a look, if one is due at this step."""
        if step % self._every == 0:
            self._precision.begin_look(self._run.device)

    def after(self, step: int, batches: Sequence[Batch], *, is_skipped: bool) -> None:
        """End the look, write it down, and let layers go back; a step that was left out says nothing of them."""
        if step % self._every:
            return
        run = self._run
        looks: dict[str, LayerLook] = {}
        for of_stage in _gather(self._precision.end_look(run.axes.tp, run.axes.dp), run.axes.pp):
            looks |= of_stage
        self._write(step, looks, self._shadow(batches[0].to(run.device)))
        if is_skipped:
            return
        for gone in _gather(self._precision.retire_worst(looks, step), run.axes.pp):
            for name in gone:
                allowed = run.config.precision.fp8.fallback_error
                why = f"error {looks[name].worst:.3g} at two looks in a row, allowed is {allowed:g}"
                run.recorder.event("fp8 given up", step, layer=name, why=why)
                run.recorder.say(f"{name} goes back to {run.config.precision.dtype}: {why}")

    def _shadow(self, batch: Batch) -> dict[str, float]:
        """The loss of a micro-batch in FP8 and unrounded."""
        losses = {"loss": self._loss(batch)}
        with self._precision.unrounded():
            losses["unrounded_loss"] = self._loss(batch)
        exact = losses["unrounded_loss"]
        return {**losses, "error": abs(losses["loss"] - exact) / abs(exact) if exact else 0.0}

    def _loss(self, batch: Batch) -> float:
        total, num_tokens = self._run.engine.eval_step([batch])
        return total / max(1, num_tokens)

    def _write(self, step: int, looks: dict[str, LayerLook], shadow: dict[str, float]) -> None:
        if self._file is None:
            return
        layers = {name: {"error": look.error, **_operands(look)} for name, look in looks.items()}
        self._file.write({"step": step, "shadow": shadow, "layers": layers})
        if not looks:
            return
        every = [operand for look in looks.values() for operand in look.operands.values()]
        worst = {
            "shadow_error": shadow["error"],
            "worst_layer_error": max(look.worst for look in looks.values()),
            "most_underflow": max((operand.underflow for operand in every), default=0.0),
            "most_saturation": max((operand.saturation for operand in every), default=0.0),
        }
        self._run.recorder.scalars(step, worst, "fp8")

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def choose_watch(run: Run, first_step: int) -> Fp8Watch | NoWatch:
    """The watch that a config asks for."""
    fp8 = run.config.precision.fp8
    return NoWatch() if fp8 is None or fp8.watch_every is None else Fp8Watch(run, first_step)


def _operands(look: LayerLook) -> dict[str, Any]:
    return {role: asdict(operand) for role, operand in look.operands.items()}


def _gather(mine: Any, pp: Axis) -> list[Any]:
    """What every stage has, in order. Collective over pp."""
    if pp.size == 1:
        return [mine]
    found: list[Any] = [None] * pp.size
    dist.all_gather_object(found, mine, group=pp.group)
    return found
