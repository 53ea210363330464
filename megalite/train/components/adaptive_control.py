"""Rate, clipping and batch size of the coming steps: functions of the step, and of what the run has measured.

    validation loss          -> the rate, under the schedule `plateau`
    noise in the gradients   -> the rate, under the schedule `noise_scale`
    norms of the gradients   -> where they are clipped, under `optimizer.clip`
    noise in the gradients   -> the batch size, under `batch.noise_scale.max_batch_size`
    attention's logits       -> what weights of queries and keys shrink by, under `optimizer.qk_clip`
    gradients that overflow  -> the scale of the loss, in fp16; the engine decides, here it is remembered
    rates so far             -> what an update counts in averages of weights; the same

All ranks decide alike.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch

from megalite.checkpoint.sizes_so_far import CONTROL, sizes_in
from megalite.config.plan import RunPlan
from megalite.config.schema import Config, ScheduleConfig
from megalite.engine.protocol import Engine, StepResult
from megalite.monitor.recorder import Recorder
from megalite.optim.adaptive import Plateau, after_validation, clip_bound, remember
from megalite.optim.groups import Pacing
from megalite.optim.noise_scale import NoiseScale, updated
from megalite.optim.schedules import StepMeasures, decay_scale, learning_rate, shape_at
from megalite.parallel.axes import Axes
from megalite.parallel.collectives import any_rank
from megalite.train.components.component import Component, Step
from megalite.train.micro_gradients import MicroGradients
from megalite.train.qk_clip import QkClip


class AdaptiveControl(Component):
    """Sets the rate and the clipping of every step, and knows the batch sizes of all."""

    name = CONTROL

    def __init__(
        self, config: Config, plan: RunPlan, *, engine: Engine, axes: Axes, device: torch.device, recorder: Recorder
    ):
        self._config, self._plan, self._engine, self._axes, self._device = config, plan, engine, axes, device
        self._recorder = recorder
        self._meter: MicroGradients | None = None
        if config.batch.noise_scale is not None:
            self._meter = MicroGradients(engine, axes)
        self._qk_clip = None if config.optimizer.qk_clip is None else QkClip(config.optimizer.qk_clip, engine, axes)
        self.load_state({})

    def load_state(self, state: dict[str, Any]) -> None:
        self._plateau = Plateau(**state.get("plateau", {}))
        self._norms: list[float] = list(state.get("norms", ()))
        self._noise = NoiseScale(**state.get("noise_scale", {}))
        is_fixed = self._config.precision.loss_scale.fixed is not None
        self._engine.set_loss_scaling({} if is_fixed else state.get("loss_scaling", {}))
        self._engine.set_averaging(state.get("averaging", {}))
        self.batch_sizes = sizes_in(state) or self._plan.batch_sizes
        """Of all steps, as far as is known."""

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        if self._plateau != Plateau():
            state["plateau"] = asdict(self._plateau)
        if self._norms:
            state["norms"] = self._norms
        if scaling := self._engine.loss_scaling():
            state["loss_scaling"] = scaling
        if averaging := self._engine.averaging():
            state["averaging"] = averaging
        if self._config.batch.noise_scale is not None:
            state["noise_scale"] = asdict(self._noise)
        if self.batch_sizes != self._plan.batch_sizes:
            state["batch_sizes"] = [asdict(span) for span in self.batch_sizes.spans]
        return state

    def before_step(self, step: Step) -> None:
        step.lr = self.learning_rate(step.number)
        self._own_lr, self._own_pacing = step.lr, self._pacing(step)
        self._engine.set_pacing(self._own_pacing)
        step.clip_norm = clip_bound(self._norms, self._config.optimizer)
        if self._meter is not None and self._is_measured(step):
            self._meter.start(self._engine.loss_scaling().get("scale", 1.0))

    def settle(self, step: Step) -> None:
        """All components have had their say on a step: give the engine its clipping, and let groups with a schedule of
        their own follow what was made of the run's rate, by the same factor. Of a rate of 0 nothing can be made."""
        self._engine.clip_norm = step.clip_norm
        own = self._own_pacing
        if own.lr_of_groups and self._own_lr and step.lr != self._own_lr:
            factor = step.lr / self._own_lr
            lr_of_groups = {number: factor * lr for number, lr in own.lr_of_groups.items()}
            self._engine.set_pacing(replace(own, lr_of_groups=lr_of_groups))

    def measure(self, step: Step, result: StepResult) -> None:
        """Take the noise in a step's gradients into account, and let the batch grow when it says so. Collective."""
        if scaling := self._engine.loss_scaling():
            step.figures["loss_scale"] = scaling["scale"]
        if self._meter is not None and self._is_measured(step):
            self._measure(self._meter, step, result)

    def after_step(self, step: Step, result: StepResult) -> None:
        """Take the norm of a step's gradients into account."""
        if result.num_tokens:
            self._norms = remember(self._norms, result.grad_norm, self._config.optimizer)

    def learning_rate(self, step: int) -> float:
        """The rate of an update."""
        return self._rate(step, self._plan.schedule)

    def _rate(self, step: int, schedule: ScheduleConfig) -> float:
        size, noise = self.batch_sizes.size(step), self._noise.tokens
        measured = StepMeasures(
            self._plateau.num_cuts,
            0.0 if noise is None else noise / (size * self._config.batch.seq_len),
            size / self._plan.full_batch_size,
        )
        return learning_rate(step, self._plan.total_steps, self._config.optimizer, schedule, measured)

    def _pacing(self, step: Step) -> Pacing:
        own = {number: self._rate(step.number, each) for number, each in self._plan.group_schedules.items()}
        scales = {} if self._qk_clip is None else self._qk_clip.scales(step)
        return Pacing(decay_scale(step.number, self._plan.total_steps, self._config.optimizer, step.lr), own, scales)

    def note_validation(self, step: int, loss: float) -> None:
        """Let a validation loss, which is the same on all ranks, have its say on the rate."""
        shape = shape_at(step, self._plan.schedule)
        if shape.name != "plateau":
            return
        settings = shape.plateau
        former, self._plateau = self._plateau, after_validation(self._plateau, loss, settings)
        if self._plateau.num_cuts > former.num_cuts:
            why = f"{settings.patience + 1} validations without a new best below {former.best:.4f}"
            self._recorder.event("rate_lowered", step, why=why, lr=self.learning_rate(step + 1))

    def _is_measured(self, step: Step) -> bool:
        settings = self._config.batch.noise_scale
        return settings is not None and step.number % settings.every == 0

    def _measure(self, meter: MicroGradients, step: Step, result: StepResult) -> None:
        if result.skipped:
            meter.stop()
            return
        settings = self._config.batch.noise_scale
        assert settings is not None
        squares = meter.finish(step.batches, result)
        if squares is None:
            return
        self._noise = updated(self._noise, squares, settings.smoothing)
        if self._noise.tokens is not None:
            step.figures["noise_scale"] = self._noise.tokens
        if settings.max_batch_size is not None:
            self._grow(step.number, settings.max_batch_size, settings.min_measurements)

    def _grow(self, step: int, max_batch_size: int, min_measurements: int) -> None:
        """Double the batch when the noise scale is above it; never beyond its bound, and never back."""
        size = self.batch_sizes.size(step + 1)
        num_tokens = size * self._config.batch.seq_len
        is_due = self._noise.num_since_growth >= min_measurements and 2 * size <= max_batch_size
        if any_rank(is_due and self._noise.exceeds(num_tokens), self._axes.world, self._device):
            self.batch_sizes = self.batch_sizes.changed(step + 1, 2 * size)
            self._noise = replace(self._noise, num_since_growth=0)
            why = f"the noise scale is above the batch of {num_tokens} tokens"
            noise_scale = self._noise.tokens  # none when the gradient drowns in it
            self._recorder.event("batch_grown", step, why=why, noise_scale=noise_scale, batch_size=2 * size)
