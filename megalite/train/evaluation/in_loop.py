"""A run's validations: every set and every task, on the engine that trains.

for each set   mean cross-entropy over its first `eval_batches` global batches
for each task  log-likelihood of every choice, accuracy, alarm
then           the watched loss, the standing, one event
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megalite.config.batch_sizes import BatchSizes
from megalite.data.loader import Loader
from megalite.data.samples import Samples
from megalite.train.evaluation.scoring import Score, Shape, log_likelihoods, score
from megalite.train.evaluation.standing import Standing
from megalite.train.evaluation.tasks import Task

if TYPE_CHECKING:
    from megalite.train.trainer import Run

LARGEST_EXPONENT = 700.0
"""exp of more overflows."""


@dataclass(frozen=True)
class SetLoss:
    """The loss on one validation set."""

    total: float
    num_tokens: int

    @property
    def loss(self) -> float:
        """Mean cross-entropy of its valid tokens, in nats; NaN where it has none."""
        return self.total / self.num_tokens if self.num_tokens else math.nan

    @property
    def perplexity(self) -> float:
        """exp of the loss."""
        return math.exp(min(self.loss, LARGEST_EXPONENT))

    def record(self) -> dict[str, Any]:
        """As events.jsonl keeps it."""
        return {"loss": self.loss, "perplexity": self.perplexity, "num_tokens": self.num_tokens}


@dataclass(frozen=True)
class Validation:
    """What one validation found."""

    sets: dict[str, SetLoss]
    tasks: dict[str, Score]
    watched: SetLoss | None
    """What decides which checkpoint is best; None without validation sets."""
    seconds: float

    def record(self) -> dict[str, Any]:
        """As events.jsonl keeps it."""
        record: dict[str, Any] = self.watched.record() if self.watched else {}
        if self.sets:
            record["sets"] = {name: each.record() for name, each in self.sets.items()}
        if self.tasks:
            record["tasks"] = {name: each.record() for name, each in self.tasks.items()}
        return {**record, "seconds": round(self.seconds, 3)}


class Evaluator:
    """Runs validations. Every method is collective."""

    def __init__(self, run: Run):
        self._run = run
        batch = run.config.batch
        self._shape = Shape(
            batch.seq_len, batch.micro_batch_size, batches_at_once=run.plan.grad_accum_steps, device=run.device
        )

    def validate(self, step: int, standing: Standing) -> tuple[Validation | None, Standing]:
        """Validate and record it.

        Args:
            step: done so far.
            standing: after the last validation.

        Returns:
            What was found, None when the run has neither sets nor tasks, and the standing after it.
        """
        run = self._run
        if not run.valid_sets and not run.tasks:
            return None, standing
        run.heart.enter("validate", step)
        clock = time.perf_counter()
        sets = {name: self._loss(samples) for name, samples in run.valid_sets.items()}
        tasks = {task.name: self._score(task) for task in run.tasks}
        watched = _watched(sets, run.config.train.watch)
        found = Validation(sets, tasks, watched, time.perf_counter() - clock)
        run.recorder.validation(step, found.record())
        for task in run.tasks:
            standing = self._judge(step, task, tasks[task.name], standing)
        if watched is not None:
            early_stopping = run.config.train.early_stopping
            standing = standing.after_loss(step, watched.loss, early_stopping.min_delta if early_stopping else 0.0)
        return found, standing

    def _loss(self, samples: Samples) -> SetLoss:
        """Over the first `eval_batches` global batches of a set."""
        run = self._run
        size, dp = run.config.batch.global_batch_size, run.axes.dp
        available = max(1, samples.num_samples_per_epoch // size)
        loader = Loader.for_run(samples, run.config, BatchSizes.fixed(size), dp_size=dp.size, dp_rank=dp.rank)
        total, num_tokens = 0.0, 0
        try:
            for _, batches in loader.steps(1, min(run.config.train.eval_batches, available)):
                loss, count = run.engine.eval_step([batch.to(run.device) for batch in batches])
                total, num_tokens = total + loss, num_tokens + count
        finally:
            loader.close()
        return SetLoss(total, num_tokens)

    def _score(self, task: Task) -> Score:
        found = log_likelihoods(task.requests, self._run.engine.token_losses, self._shape, self._run.axes.dp)
        return score(task.questions, found)

    def _judge(self, step: int, task: Task, found: Score, standing: Standing) -> Standing:
        """Note a task's score, and raise the alarm when it has fallen far below its best."""
        best = standing.best_scores.get(task.name, found.accuracy)
        if task.alarm_drop is not None and best - found.accuracy > task.alarm_drop:
            why = f"accuracy {found.accuracy:.4f} is {best - found.accuracy:.4f} below its best, {best:.4f}"
            recorder = self._run.recorder
            recorder.event("score alarm", step, task=task.name, accuracy=found.accuracy, best=best, why=why)
            recorder.say(f"ALARM at step {step}: {task.name}: {why}")
        return standing.after_score(task.name, found.accuracy)


def _watched(sets: dict[str, SetLoss], name: str | None) -> SetLoss | None:
    """The set that is watched, or all of them together; None where no token of it counted."""
    chosen = list(sets.values()) if name is None else [sets[name]]
    watched = SetLoss(sum(each.total for each in chosen), sum(each.num_tokens for each in chosen))
    return watched if watched.num_tokens else None
