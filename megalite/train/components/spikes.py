"""Steps that are left out: each is written down; spikes that repeat cut the rate, then send the run back.

vetoes         asked inside every step, before the update: is this one a spike?      [all ranks vote]
after_step     write down what happened, say what follows
"""

from __future__ import annotations

from typing import Any

import torch

from megalite.config.sections.health import SpikesConfig
from megalite.engine.protocol import Engine, StepResult
from megalite.monitor.recorder import Recorder
from megalite.parallel.axes import Axes
from megalite.parallel.collectives import any_rank
from megalite.train.components.component import Component, RollBack, Step
from megalite.train.spike_detector import SpikeDetector

MOST_DOCUMENTS = 1000
"""Of a step that was left out: an event names no more."""


class SpikeGuard(Component):
    """Leaves out steps that are spikes. What it decides follows from numbers that all ranks share.

    Args:
        settings: of the run.
        engine: asks before every update.
        adapts_scale: the loss is scaled, and a gradient that overflows is no spike: the scale adapts.
    """

    name = "spikes"

    def __init__(
        self,
        settings: SpikesConfig,
        *,
        engine: Engine,
        axes: Axes,
        device: torch.device,
        recorder: Recorder,
        adapts_scale: bool,
    ):
        self._settings, self._axes, self._device = settings, axes, device
        self._recorder, self._adapts_scale = recorder, adapts_scale
        self._detector = SpikeDetector(settings, {})
        self.has_refused = False
        """The step at hand was refused by this component."""
        engine.hooks.vetoes.add(self._veto)

    @property
    def is_in_trouble(self) -> bool:
        """Whether there were spikes of late, so that the run may have to go back."""
        return self._detector.first_spike is not None

    def state(self) -> dict[str, Any]:
        return self._detector.state()

    def load_state(self, state: dict[str, Any]) -> None:
        self._detector = SpikeDetector(self._settings, state)

    def before_step(self, step: Step) -> None:
        self.has_refused = False
        step.lr *= self._detector.lr_factor(step.number)

    def after_step(self, step: Step, result: StepResult) -> RollBack | None:
        is_spike = self.has_refused or (result.skipped and not self._adapts_scale)
        if not result.num_tokens or (result.skipped and not is_spike):
            return None
        settings, detector = self._settings, self._detector
        remedy = detector.note(step.number, result.loss, result.grad_norm, is_spike=is_spike)
        if remedy == "cut":
            until, factor = detector.cut_until, settings.cut_factor
            why = f"{settings.cut_after} spikes within {settings.window} steps"
            self._recorder.event("rate_cut", step.number, why=why, factor=factor, until=until)
            self._recorder.say(f"step {step.number}: {why}; learning rate times {factor:g} until step {until}")
        if remedy != "roll back":
            return None
        first = detector.first_spike
        assert first is not None
        why = f"{settings.roll_back_after} more spikes while the rate was cut, the first at step {first}"
        return RollBack(first, why, skip_samples=settings.skip_steps * len(step.samples))

    def _veto(self, loss: float, grad_norm: float) -> str:
        """Why the update is left out: what any rank finds, since their norms may differ in the last bit. Collective."""
        why = self._detector.why_spike(loss, grad_norm)
        self.has_refused = any_rank(bool(why), self._axes.world, self._device)
        return (why or "a spike, as another rank sees it") if self.has_refused else ""


class SkippedSteps(Component):
    """Writes down every step that was left out, whoever left it out, and which documents it had."""

    name = "skipped_steps"

    def __init__(self, recorder: Recorder, spikes: SpikeGuard | None):
        self._recorder, self._spikes = recorder, spikes

    def after_step(self, step: Step, result: StepResult) -> None:
        if not result.num_tokens:
            self._record("empty_batch", step, result)
        elif result.skipped:
            is_spike = self._spikes is not None and self._spikes.has_refused
            self._record("spike" if is_spike else "skip", step, result)

    def _record(self, kind: str, step: Step, result: StepResult) -> None:
        if self._recorder.is_writer:
            cursor, samples = step.data.cursor, step.samples
            documents = step.data.document_ids(samples.start, samples.stop)
            self._recorder.event(
                kind,
                step.number,
                why=result.why,
                loss=result.loss,
                grad_norm=result.grad_norm,
                samples=[cursor.data_index(samples[0]), cursor.data_index(samples[-1]) + 1],
                num_documents=len(documents),
                documents=documents[:MOST_DOCUMENTS],
            )
        self._recorder.say(f"step {step.number} is left out: {result.why}")
