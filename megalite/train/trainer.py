"""The training loop.

    for each step: read -> train_step -> record -> validate and save when due -> stop when asked

The trainer knows nothing of parallelism or DeepSpeed: an `Engine` does the step, a `Loader` reads this rank's share,
and every decision that changes what happens next is taken by all ranks together.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megalite.checkpoint import catalog, writer
from megalite.checkpoint.format import Progress
from megalite.config.load import dump_config
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
    stop: StopRequest


class Trainer:
    """Trains from where `progress` stands to the plan's last step."""

    def __init__(self, run: Run, progress: Progress):
        self.run = run
        self.progress = progress
        self._saved_step = progress.step if progress.step else None

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
                if self._due(run.config.checkpoint.every, step):
                    self.save()
                if step < run.plan.total_steps and run.stop.agreed(run.axes.world, run.device):
                    return self._stop(step)
                clock = time.perf_counter()
        finally:
            loader.close()
        self.validate()
        self.save()
        run.recorder.event("done", self.progress.step)
        return EXIT_DONE

    def _step(self, step: int, batches: list[Batch]) -> StepResult:
        run = self.run
        config = run.config
        lr = learning_rate(step, run.plan.total_steps, config.optimizer, config.schedule)
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
        loader = self._loader(run.valid_samples)
        total, num_tokens = 0.0, 0
        try:
            for _, batches in loader.steps(1, min(run.config.train.eval_batches, available)):
                loss, count = run.engine.eval_step([batch.to(run.device) for batch in batches])
                total, num_tokens = total + loss, num_tokens + count
        finally:
            loader.close()
        mean = total / max(1, num_tokens)
        run.recorder.validation(self.progress.step, mean, math.exp(min(mean, 700.0)), num_tokens)

    def save(self) -> None:
        """Write a checkpoint of the current step and drop those that are no longer kept."""
        run, step = self.run, self.progress.step
        if step == self._saved_step:
            return
        start = time.perf_counter()
        root: Path = run.config.run.dir / catalog.CHECKPOINTS
        tokenizer = run.config.data.tokenizer or run.samples.tokenizer_path
        folder = writer.save(
            root,
            run.engine,
            run.axes,
            plan=run.plan,
            progress=self.progress,
            config_text=dump_config(run.config),
            zero_stage=run.config.parallel.zero_stage,
            data={"fingerprint": run.samples.fingerprint, "tokenizer": str(tokenizer) if tokenizer else None},
            device=run.device,
        )
        self._saved_step = step
        if run.axes.global_rank == 0:
            keep = run.config.checkpoint
            dropped = catalog.prune(root, keep_last=keep.keep_last, keep_every=keep.keep_every)
            seconds = round(time.perf_counter() - start, 3)
            run.recorder.event("save", step, folder=folder.name, seconds=seconds, dropped=[d.name for d in dropped])
            run.recorder.say(f"saved {folder} in {seconds:.1f} s")

    def _stop(self, step: int) -> int:
        """End cleanly on request, to be continued."""
        self.save()
        self.run.recorder.event("stop", step, why=self.run.stop.signal_name or "asked on another rank")
        self.run.recorder.say(f"stopped at step {step} as asked; the same command goes on from here")
        return EXIT_REQUEUE

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
