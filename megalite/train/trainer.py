"""The training loop.

    for each step: read -> train_step -> record -> validate and save when due -> stop when asked

The trainer knows nothing of parallelism or DeepSpeed: an `Engine` does the step, a `Loader` reads this rank's share,
and every decision that changes what happens next is taken by all ranks together.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import torch

from megalite.checkpoint.background import agree
from megalite.checkpoint.fence import Fence
from megalite.checkpoint.format import Progress
from megalite.config.plan import RunPlan
from megalite.config.schema import Config
from megalite.data import audit
from megalite.data.loader import Batch, Loader
from megalite.data.samples import Samples
from megalite.engine.protocol import Engine, NonFiniteLossError, StepResult
from megalite.errors import EXIT_DONE, EXIT_REQUEUE
from megalite.monitor.recorder import Recorder
from megalite.optim.schedules import learning_rate
from megalite.parallel.axes import Axes
from megalite.train.checkpoints import open_checkpoints
from megalite.train.heartbeat import Heart
from megalite.train.signals import StopRequest


@dataclass
class Run:
    """What a rank trains with."""

    config: Config
    plan: RunPlan
    axes: Axes
    device: torch.device
    engine: Engine
    samples: Samples
    valid_samples: Samples | None
    recorder: Recorder
    fence: Fence
    stop: StopRequest
    heart: Heart


class Trainer:
    """Trains from where `progress` stands to the plan's last step."""

    def __init__(self, run: Run, progress: Progress):
        self.run = run
        self.progress = progress
        self._checkpoints = open_checkpoints(run, saved_step=progress.step or None)
        self._validation: tuple[int, float] | None = None

    def train(self) -> int:
        """Train to the end or to a stop request; return the exit code."""
        run = self.run
        loader = self._loader(run.samples)
        clock = time.perf_counter()
        try:
            for step, batches in loader.steps(self.progress.step + 1, run.plan.total_steps):
                result = self._step(step, batches)
                now = time.perf_counter()
                run.recorder.step(step, result, num_tokens_total=self.progress.num_tokens, seconds=now - clock)
                if self._due(run.config.train.eval_every, step):
                    self.validate()
                is_asked_to_stop, is_asked_to_save = self._vote(step)
                if is_asked_to_save or self._due(run.config.checkpoint.every, step):
                    self._checkpoints.save(self.progress, self._validation_loss())
                if is_asked_to_stop and step < run.plan.total_steps:
                    return self._stop(step)
                clock = time.perf_counter()
                run.heart.enter("data", step + 1)
            self.validate()
            self._finish()
        finally:
            loader.close()
            self._checkpoints.close()
        run.recorder.event("done", self.progress.step)
        return EXIT_DONE

    def _step(self, step: int, batches: list[Batch]) -> StepResult:
        run = self.run
        config = run.config
        lr = learning_rate(step, run.plan.total_steps, config.optimizer, config.schedule)
        run.heart.enter("train", step)
        try:
            result = run.engine.train_step([batch.to(run.device, non_blocking=True) for batch in batches], lr)
        except NonFiniteLossError as error:
            run.recorder.event("nonfinite", step, why=str(error))
            raise
        size = config.batch.global_batch_size
        self.progress = replace(
            self.progress,
            step=step,
            num_updates=self.progress.num_updates + (not result.skipped),
            num_samples=step * size,
            num_tokens=self.progress.num_tokens + run.plan.tokens_per_step,
            data_chain=audit.chain(self.progress.data_chain, run.samples, (step - 1) * size, step * size),
        )
        return result

    def validate(self) -> None:
        """Mean cross-entropy and perplexity over the first `eval_batches` global batches of the validation data."""
        run = self.run
        if run.valid_samples is None:
            return
        available = max(1, run.valid_samples.num_samples_per_epoch // run.config.batch.global_batch_size)
        run.heart.enter("validate", self.progress.step)
        loader = self._loader(run.valid_samples)
        total, num_tokens = 0.0, 0
        try:
            for _, batches in loader.steps(1, min(run.config.train.eval_batches, available)):
                loss, count = run.engine.eval_step([batch.to(run.device) for batch in batches])
                total, num_tokens = total + loss, num_tokens + count
        finally:
            loader.close()
        mean = total / max(1, num_tokens)
        self._validation = (self.progress.step, mean)
        run.recorder.validation(self.progress.step, mean, math.exp(min(mean, 700.0)), num_tokens)

    def _vote(self, step: int) -> tuple[bool, bool]:
        """All ranks tell each other, in one collective a step, what they were asked and how the pending save goes.

        Returns:
            Whether to stop, and whether to save, after this step.
        """
        run = self.run
        run.heart.enter("save", step)
        flags = (run.stop.is_asked(step), run.stop.takes_save(), *self._checkpoints.saver.flags())
        is_asked_to_stop, is_asked_to_save, is_busy, has_failed = agree(flags, run.axes.world, run.device)
        self._checkpoints.settle(is_busy=is_busy, has_failed=has_failed)
        return is_asked_to_stop, is_asked_to_save

    def _stop(self, step: int) -> int:
        """End cleanly on request, to be continued."""
        self._finish()
        self.run.recorder.event("stop", step, why=self.run.stop.why(step))
        self.run.recorder.say(f"stopped at step {step} as asked; the same command goes on from here")
        return EXIT_REQUEUE

    def _finish(self) -> None:
        """See to it that the last step is saved."""
        self.run.heart.enter("save", self.progress.step)
        self._checkpoints.finish(self.progress, self._validation_loss())
        self.run.heart.enter("done", self.progress.step)

    def _validation_loss(self) -> float | None:
        """The validation loss of this very step."""
        return self._validation[1] if self._validation and self._validation[0] == self.progress.step else None

    def _loader(self, samples: Samples) -> Loader:
        batch = self.run.config.batch
        return Loader(
            samples,
            seq_len=batch.seq_len,
            micro_batch_size=batch.micro_batch_size,
            global_batch_size=batch.global_batch_size,
            dp_size=self.run.axes.dp.size,
            dp_rank=self.run.axes.dp.rank,
            prefetch=self.run.config.data.prefetch,
        )

    def _due(self, every: int | None, step: int) -> bool:
        return every is not None and step % every == 0 and step < self.run.plan.total_steps
