"""The training loop.

    for each step: read -> train_step -> record -> validate and save when due -> stop when asked

The trainer knows nothing of parallelism or DeepSpeed: an `Engine` does the step, a `Loader` reads this rank's share,
and every decision that changes what happens next is taken by all ranks together.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch
from torch.distributed import ReduceOp

from megalite.checkpoint.fence import Fence
from megalite.checkpoint.format import Progress
from megalite.config.plan import RunPlan, has_copies
from megalite.config.schema import Config
from megalite.data import audit
from megalite.data.cursor import add_counts
from megalite.data.loader import Batch, Loader
from megalite.data.samples import Samples
from megalite.engine.protocol import Engine, NonFiniteLossError, StepResult
from megalite.errors import EXIT_DONE, EXIT_REQUEUE
from megalite.monitor.layers import LayerWatch
from megalite.monitor.recorder import Recorder
from megalite.optim.schedules import last_stable_step
from megalite.parallel.axes import Axes
from megalite.parallel.collectives import agree, all_reduce
from megalite.train.checkpoints import open_checkpoints
from megalite.train.evaluation.in_loop import Evaluator, Validation
from megalite.train.evaluation.standing import Standing
from megalite.train.evaluation.tasks import Task
from megalite.train.fp8_watch import choose_watch
from megalite.train.health import Health
from megalite.train.heartbeat import Heart
from megalite.train.memory_check import MemoryCheck
from megalite.train.probe import Probe
from megalite.train.replicas import Replicas
from megalite.train.rollback import go_back
from megalite.train.signals import StopRequest
from megalite.train.steering import Steering

NUM_NAMED = 4
"""Drifted weights that a message names."""


@dataclass
class Run:
    """What a rank trains with."""

    config: Config
    plan: RunPlan
    axes: Axes
    device: torch.device
    engine: Engine
    samples: Samples
    valid_sets: dict[str, Samples]
    tasks: list[Task]
    recorder: Recorder
    fence: Fence
    stop: StopRequest
    heart: Heart


class Trainer:
    """Trains from where `progress` stands to the plan's last step."""

    def __init__(self, run: Run, progress: Progress):
        self.run = run
        self.progress = progress
        self._health = Health(run, progress.health)
        self._checkpoints = open_checkpoints(
            run, saved_step=progress.step or None, is_in_trouble=lambda: self._health.first_spike is not None
        )
        self._layers = LayerWatch(run.engine, run.config, run.plan, run.axes)
        self._replicas: Replicas | None = None
        has_checks = run.config.health.check_replicas_every is not None
        if has_checks and has_copies(run.config.parallel, run.plan.model, run.axes.dp.size):
            self._replicas = Replicas(run.engine.stage, run.axes, run.config.parallel.zero_stage)
        self._memory: MemoryCheck | None = None
        if run.config.health.check_memory_every is not None:
            self._memory = MemoryCheck(run.engine, run.axes, run.config.health.check_memory_every)
        self._equal_at = progress.step
        self._trunk = last_stable_step(run.plan.total_steps, run.plan.schedule)
        self._watch = choose_watch(run, progress.step)
        self._probe = Probe(run.heart, run.device, run.config.slurm.probe_seconds)
        self._steering = Steering(run, progress.steering)
        self._evaluator = Evaluator(run)
        self._standing = Standing.load(progress.evaluation)
        self._validation: tuple[int, Validation | None] = (-1, None)

    def train(self) -> int:
        """Train to the end or to a stop request; return the exit code."""
        try:
            while True:
                code = self._train_on()
                if code is not None:
                    return code
        finally:
            self._checkpoints.close()
            self._watch.close()

    def _train_on(self) -> int | None:
        """Train as far as the data goes on as planned; None after a rollback, or when the batch has grown."""
        run = self.run
        if self._reason_to_stop_early():
            run.recorder.say(f"stopped early before: {self._reason_to_stop_early()}; raise the patience to go on")
            return EXIT_DONE
        dp, sizes = run.axes.dp, self._steering.batch_sizes
        pin = run.device.type == "cuda"
        loader = Loader.for_run(run.samples, run.config, sizes, dp_size=dp.size, dp_rank=dp.rank, pin_memory=pin)
        clock = time.perf_counter()
        try:
            for step, batches in loader.steps(self.progress.step + 1, run.plan.total_steps):
                result = self._step(step, batches)
                now = time.perf_counter()
                run.recorder.step(
                    step,
                    result,
                    num_tokens=sizes.size(step) * run.config.batch.seq_len,
                    num_tokens_total=self.progress.num_tokens,
                    seconds=now - clock,
                    figures=self._steering.figures,
                )
                remedy = self._health.note(step, result, self._samples_of(step))
                self.progress = replace(self.progress, health=self._health.state())
                if remedy == "roll back":
                    return self._roll_back_from_spikes()
                if self._due(run.config.train.eval_every, step):
                    self.validate()
                is_asked_to_stop, is_asked_to_save, is_finished_early = self._vote(step)
                saves = is_asked_to_save or self._due(run.config.checkpoint.every, step) or step == self._trunk
                ends = is_asked_to_stop or is_finished_early or step == run.plan.total_steps
                if self._memory_has_changed(step) or self._has_drifted(step, is_saved=saves or ends):
                    return None
                if saves:
                    self._checkpoints.save(self.progress, self._validation_loss())
                if is_finished_early:
                    break
                if is_asked_to_stop and step < run.plan.total_steps:
                    return self._stop(step)
                if self._steering.batch_sizes != sizes:
                    return None
                self._probe.take()
                clock = time.perf_counter()
                run.heart.enter("data", step + 1)
            self._end()
        finally:
            loader.close()
        run.recorder.event("done", self.progress.step, consumed=self._consumed())
        return EXIT_DONE

    def _step(self, step: int, batches: list[Batch]) -> StepResult:
        run = self.run
        config = run.config
        lr = self._steering.learning_rate(step) * self._health.lr_factor(step)
        run.engine.clip_norm = self._steering.clip_norm()
        run.heart.enter("train", step)
        batches = [batch.to(run.device, non_blocking=True) for batch in batches]
        self._watch.before(step)
        self._steering.watch(step)
        try:
            result, layers = self._layers.watch(step, batches, lambda: run.engine.train_step(batches, lr))
        except NonFiniteLossError as error:
            run.recorder.event("nonfinite", step, why=str(error))
            raise
        first, stop = (self._steering.batch_sizes.first_sample(each) for each in (step, step + 1))
        self._steering.note_step(step, batches, result)
        self._watch.after(step, batches, is_skipped=result.skipped)
        if layers:
            run.recorder.layers(step, layers)
        self.progress = replace(
            self.progress,
            step=step,
            num_updates=self.progress.num_updates + (not result.skipped),
            num_samples=stop,
            num_tokens=self.progress.num_tokens + (stop - first) * config.batch.seq_len,
            data_chain=audit.chain(self.progress.data_chain, run.samples, first, stop),
            consumed=add_counts(self.progress.consumed, run.samples.count(first, stop)),
            steering=self._steering.state(),
        )
        return result

    def _memory_has_changed(self, step: int) -> bool:
        """Go back when a rank's masters or optimizer state had changed by themselves before this step. Collective."""
        found = self._memory.after_step(step) if self._memory is not None else []
        if not found:
            return False
        why = f"memory has changed since the update before: {'; '.join(found)}"
        self.run.recorder.event("memory_changed", step, why=why)
        self._roll_back(step - 1, why, skip_samples=None)  # a checkpoint of the step before may have the wrong number
        return True

    def _has_drifted(self, step: int, *, is_saved: bool) -> bool:
        """Compare replicated weights when that is due, and before every save; go back when they differ. Collective."""
        run = self.run
        if self._replicas is None or (step % run.config.health.check_replicas_every and not is_saved):
            return False
        drifts = self._replicas.find_drift()
        if not drifts:
            self._equal_at = step
            return False
        why = "; ".join(map(str, drifts[:NUM_NAMED])) + ("; ..." if len(drifts) > NUM_NAMED else "")
        ranks = sorted({rank for drift in drifts for rank in drift.ranks})
        run.recorder.event("drift", step, why=why, ranks=ranks, weights=[drift.name for drift in drifts])
        self._roll_back(self._equal_at + 1, f"copies of weights have drifted apart: {why}", skip_samples=None)
        return True

    def _roll_back_from_spikes(self) -> None:
        """Go back to before the first of the present spikes, and leave out the data that was read since then."""
        settings = self.run.config.health.spikes
        first = self._health.first_spike
        why = f"{settings.roll_back_after} more spikes while the rate was cut, the first at step {first}"
        self._roll_back(
            first, why, skip_samples=settings.skip_steps * self._steering.batch_sizes.size(self.progress.step)
        )

    def _roll_back(self, before: int, why: str, *, skip_samples: int | None) -> None:
        """Go back to the last checkpoint from before a step. Collective.

        Raises:
            Unstable: that has been tried too often.
        """
        run, now = self.run, self.progress
        self._health.blame(now.step, why)
        self._checkpoints.settle_pending()
        if self._memory is not None:
            self._memory.forget()
        self.progress, origin = go_back(run, now, before, skip_samples=skip_samples)
        self._health.go_back(self.progress.health)
        self._steering = Steering(run, self.progress.steering)
        self._standing, self._validation = Standing.load(self.progress.evaluation), (-1, None)
        self.progress = replace(self.progress, health=self._health.state())
        self._checkpoints.went_back_to(self.progress.step)
        self._watch.rewind(self.progress.step)
        self._equal_at = self.progress.step
        step, left_out = self.progress.step, [list(gap) for gap in self.progress.account.gaps]
        run.recorder.event("rollback", now.step, why=why, to_step=step, origin=origin, left_out=left_out)
        run.recorder.say(f"step {now.step}: {why}; back to {origin}, step {step}")

    def _samples_of(self, step: int) -> range:
        """The run's samples that a step reads."""
        return range(self._steering.batch_sizes.first_sample(step), self._steering.batch_sizes.first_sample(step + 1))

    def _consumed(self) -> dict[str, dict[str, int]]:
        """What the run has read of each source."""
        seq_len = self.run.config.batch.seq_len
        return {name: {"samples": count, "tokens": count * seq_len} for name, count in self.progress.consumed.items()}

    def validate(self) -> None:
        """Validate where the run stands, once."""
        step = self.progress.step
        if self._validation[0] == step:
            return
        found, self._standing = self._evaluator.validate(step, self._standing)
        self._validation = (step, found)
        self.progress = replace(self.progress, evaluation=self._standing.saved())
        if found is not None and found.watched is not None:
            self._steer(found.watched.loss)

    def _steer(self, validation_loss: float) -> None:
        """Let the validation loss have its say on the rate; one rank's, so that none decides by another last bit."""
        step = self.progress.step
        loss = torch.tensor(validation_loss, dtype=torch.float64, device=self.run.device)
        cut = self._steering.note_validation(all_reduce(loss, self.run.axes.world, ReduceOp.MAX).item())
        if cut:
            self.run.recorder.event("rate lowered", step, why=cut, lr=self._steering.learning_rate(step + 1))
        self.progress = replace(self.progress, steering=self._steering.state())

    def _reason_to_stop_early(self) -> str:
        return self._standing.reason_to_stop(self.run.config.train.early_stopping)

    def _vote(self, step: int) -> tuple[bool, bool, bool]:
        """All ranks tell each other, in one collective a step, what they were asked and how the pending save goes.

        Returns:
            Whether to stop, whether to save, and whether the run ends early, after this step.
        """
        run = self.run
        run.heart.enter("save", step)
        wishes = (run.stop.is_asked(step), run.stop.takes_save(), bool(self._reason_to_stop_early()))
        flags = (*wishes, *self._checkpoints.saver.flags())
        *wishes, is_busy, has_failed = agree(flags, run.axes.world, run.device)
        self._checkpoints.settle(is_busy=is_busy, has_failed=has_failed)
        is_asked_to_stop, is_asked_to_save, is_finished_early = wishes
        return is_asked_to_stop, is_asked_to_save, is_finished_early

    def _end(self) -> None:
        """End the run for good: at its last step, or early."""
        step, recorder = self.progress.step, self.run.recorder
        self.validate()
        self._finish()
        if step < self.run.plan.total_steps:
            recorder.event("early stop", step, why=self._reason_to_stop_early())
            recorder.say(f"stopped early at step {step}: {self._reason_to_stop_early()}")

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
        """The watched validation loss of this very step."""
        step, found = self._validation
        is_known = step == self.progress.step and found is not None and found.watched is not None
        return found.watched.loss if is_known else None

    def _due(self, every: int | None, step: int) -> bool:
        return every is not None and step % every == 0 and step < self.run.plan.total_steps
