"""What of a run goes by what the run has measured. Everything else is a function of the step.

    validation loss          -> the rate, under the schedule `plateau`
    norms of the gradients   -> where they are clipped, under `optimizer.clip`
    noise in the gradients   -> the batch size, under `batch.noise_scale.max_batch_size`
    gradients that overflow  -> the scale of the loss, in fp16; DeepSpeed decides, here it is remembered

Its state is part of the progress that checkpoints hold, and all ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from megalite.optim.noise_scale import NoiseScale, updated
from megalite.optim.plateau import Plateau, judge
from megalite.optim.recent_norms import clip_bound, remember
from megalite.optim.schedules import learning_rate
from megalite.parallel.collectives import any_rank
from megalite.train.micro_gradients import MicroGradients
from megalite.train.sizes_so_far import sizes_in

if TYPE_CHECKING:
    from megalite.data.loader import Batch
    from megalite.engine.protocol import StepResult
    from megalite.train.trainer import Run


class Steering:
    """The learning rate, the clipping and the batch size of the coming steps.

    Args:
        state: of the checkpoint that the run goes on from; empty for a new run.
    """

    def __init__(self, run: Run, state: dict[str, Any]):
        self._run = run
        self._plateau = Plateau(**state.get("plateau", {}))
        self._norms: list[float] = list(state.get("norms", ()))
        self._noise = NoiseScale(**state.get("noise_scale", {}))
        run.engine.set_loss_scaling(state.get("loss_scaling", {}))
        self.batch_sizes = sizes_in(state) or run.plan.batch_sizes
        """Of all steps, as far as is known."""
        self.figures: dict[str, float] = {}
        """What the last step measured, for metrics.jsonl."""
        self._meter: MicroGradients | None = None
        if run.config.batch.noise_scale is not None:
            self._meter = MicroGradients(run.engine.stage, run.axes)

    def learning_rate(self, step: int) -> float:
        """The rate of an update."""
        config, plan = self._run.config, self._run.plan
        return learning_rate(step, plan.total_steps, config.optimizer, plan.schedule, self._plateau.num_cuts)

    def watch(self, step: int) -> None:
        """Listen to the coming step, if it is to be measured."""
        if self._is_measured(step):
            self._meter.start(self._run.engine.loss_scaling().get("scale", 1.0))

    def note_step(self, step: int, batches: Sequence[Batch], result: StepResult) -> None:
        """Take a step's gradients into account, and let the batch grow when they say so. Collective."""
        if result.num_tokens:
            self._norms = remember(self._norms, result.grad_norm, self._run.config.optimizer)
        scaling = self._run.engine.loss_scaling()
        self.figures = {"loss_scale": scaling["scale"]} if scaling else {}
        if not self._is_measured(step):
            return
        if result.skipped:
            self._meter.stop()
            return
        settings = self._run.config.batch.noise_scale
        squares = self._meter.finish(batches, result)
        self._noise = updated(self._noise, squares, settings.smoothing)
        if self._noise.tokens is not None:
            self.figures["noise_scale"] = self._noise.tokens
        if settings.max_batch_size is not None:
            self._grow(step)

    def clip_norm(self) -> float | None:
        """The largest gradient norm of the coming step."""
        return clip_bound(self._norms, self._run.config.optimizer)

    def note_validation(self, loss: float) -> str:
        """Take a validation loss into account, equal on all ranks. Returns what is done about it, or nothing."""
        schedule = self._run.config.schedule
        if schedule.name != "plateau":
            return ""
        former, self._plateau = self._plateau, judge(self._plateau, loss, schedule.plateau)
        if self._plateau.num_cuts == former.num_cuts:
            return ""
        return f"{schedule.plateau.patience + 1} validations without a new best below {former.best:.4f}"

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold."""
        config, state = self._run.config, {}
        if config.schedule.name == "plateau":
            state["plateau"] = asdict(self._plateau)
        if self._norms:
            state["norms"] = self._norms
        if scaling := self._run.engine.loss_scaling():
            state["loss_scaling"] = scaling
        if config.batch.noise_scale is not None:
            state["noise_scale"] = asdict(self._noise)
        if self.batch_sizes != self._run.plan.batch_sizes:
            state["batch_sizes"] = [asdict(span) for span in self.batch_sizes.spans]
        return state

    def _is_measured(self, step: int) -> bool:
        return self._meter is not None and step % self._run.config.batch.noise_scale.every == 0

    def _grow(self, step: int) -> None:
        """Double the batch when the noise scale is above it; never beyond its bound, and never back."""
        run, settings = self._run, self._run.config.batch.noise_scale
        size = self.batch_sizes.size(step + 1)
        num_tokens = size * run.config.batch.seq_len
        is_due = self._noise.num_since_growth >= settings.min_measurements and 2 * size <= settings.max_batch_size
        if any_rank(is_due and self._noise.exceeds(num_tokens), run.axes.world, run.device):
            self.batch_sizes = self.batch_sizes.changed(step + 1, 2 * size)
            self._noise = replace(self._noise, num_since_growth=0)
            why = f"the noise scale is above the batch of {num_tokens} tokens"
            noise_scale = self._noise.tokens  # none when the gradient drowns in it
            run.recorder.event("batch grown", step, why=why, noise_scale=noise_scale, batch_size=2 * size)
