"""A run's validations: every set and every task, on the engine that trains.

for each set   mean cross-entropy over its first `eval_batches` global batches
for each task  log-likelihood of every choice, accuracy
then           the watched loss
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megalite.config.batch_sizes import BatchSizes
from megalite.config.plan import RunPlan
from megalite.config.schema import Config
from megalite.data.loader import Loader
from megalite.data.samples import Samples
from megalite.engine.protocol import Engine
from megalite.parallel.axes import Axes
from megalite.parallel.collectives import one_for_all
from megalite.train.evaluation.scoring import Score, Shape, log_likelihoods, score
from megalite.train.evaluation.tasks import Task

LARGEST_EXPONENT = 700.0
"""exp of more overflows."""


@dataclass(frozen=True)
class SetLoss:
    """The loss on one validation set."""

    total: float
    num_tokens: int
    weight: float
    """Of these tokens, by which the total is divided: their number, where the data has no loss weights."""
    are_pairs: bool = False
    """The loss is of pairs of answers, whose number the others are."""

    @property
    def loss(self) -> float:
        """Mean cross-entropy of its valid tokens by their weights, in nats; NaN where it has none."""
        return self.total / self.weight if self.weight else math.nan

    @property
    def perplexity(self) -> float:
        """exp of the loss."""
        return math.exp(min(self.loss, LARGEST_EXPONENT))

    def record(self) -> dict[str, Any]:
        """As events.jsonl keeps it."""
        if self.are_pairs:
            return {"loss": self.loss, "num_pairs": self.num_tokens}
        record = {"loss": self.loss, "perplexity": self.perplexity, "num_tokens": self.num_tokens}
        return record if self.weight == self.num_tokens else {**record, "weight": self.weight}


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
    """Runs validations. Every method is collective.

    Args:
        sets: the validation sets, by name.
        tasks: what is scored besides.
    """

    def __init__(
        self,
        config: Config,
        plan: RunPlan,
        *,
        sets: Mapping[str, Samples],
        tasks: Sequence[Task],
        engine: Engine,
        axes: Axes,
        device: torch.device,
    ):
        self._config, self._engine, self._axes, self._device = config, engine, axes, device
        self._sets, self.tasks = sets, tasks
        batch = config.batch
        self._shape = Shape(batch.seq_len, batch.micro_batch_size, batches_at_once=plan.grad_accum_steps, device=device)

    def validate(self) -> Validation:
        """Every set and every task, on the weights as they are, averaged where the optimizer averages. All ranks find
        the same losses, to the last bit, for what they decide by them."""
        clock = time.perf_counter()
        with self._engine.averaged_weights():
            sets = {name: self._loss(samples) for name, samples in self._sets.items()}
            tasks = {task.name: self._score(task) for task in self.tasks}
        watched = _watched(sets, self._config.train.watch)
        return Validation(sets, tasks, watched, time.perf_counter() - clock)

    def _loss(self, samples: Samples) -> SetLoss:
        """Over the first `eval_batches` global batches of a set, each of its samples once: the last batch is filled up
        with some of which nothing counts."""
        size, batch = self._config.batch.global_batch_size, self._axes.batch
        available, end = -(-samples.num_samples_per_epoch // size), samples.num_samples_per_epoch * samples.seq_len
        loader = Loader.for_run(samples, self._config, BatchSizes.fixed(size), dp_size=batch.size, dp_rank=batch.rank)
        total, num_tokens, weight = 0.0, 0, 0.0
        try:
            for _, batches in loader.steps(1, min(self._config.train.eval_batches, available)):
                found = self._engine.eval_step([each.up_to(end).to(self._device) for each in batches])
                total, num_tokens, weight = total + found.total, num_tokens + found.num_tokens, weight + found.weight
        finally:
            loader.close()
        are_pairs = self._config.train.preference is not None
        return SetLoss(one_for_all(total, self._axes.world, self._device), num_tokens, weight, are_pairs)

    def _score(self, task: Task) -> Score:
        found = log_likelihoods(task.requests, self._engine.token_losses, self._shape, self._axes.batch)
        return score(task.questions, found)


def _watched(sets: dict[str, SetLoss], name: str | None) -> SetLoss | None:
    """The set that is watched, or all of them together; None where no token of it counted."""
    chosen = list(sets.values()) if name is None else [sets[name]]
    watched = SetLoss(
        sum(each.total for each in chosen),
        sum(each.num_tokens for each in chosen),
        sum(each.weight for each in chosen),
        are_pairs=any(each.are_pairs for each in chosen),
    )
    return watched if watched.num_tokens else None
