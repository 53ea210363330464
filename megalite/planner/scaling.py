"""How a model scales: the best layout at every number of ranks, with the config's batch and with one that grows.

    strong    the global batch stays: the same run, sooner done
    weak      the global batch grows with the ranks: each has the same work

Efficiency is tokens a second and rank, over those of the fewest ranks on which the model fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

from megalite.config.batch_sizes import steps_for_tokens
from megalite.config.schema import BatchConfig, Config
from megalite.planner.bounds import MicroBatches
from megalite.planner.estimate import Estimate
from megalite.planner.machines import Machine
from megalite.planner.nearest import refusal
from megalite.planner.search import Search, search
from megalite.section import Section

KINDS = ("strong", "weak")
LONG_RUN_STEPS = 100_000
GROWTH = 4
"""Of ranks from one point of a curve to the next."""


@dataclass(frozen=True)
class Point:
    """The best layout on so many ranks."""

    kind: str
    ranks: int
    global_batch_size: int
    """Sequences."""
    best: Estimate
    efficiency: float

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready form."""
        about = {"kind": self.kind, "ranks": self.ranks, "global_batch_size": self.global_batch_size}
        return {**about, "efficiency": self.efficiency, **self.best.to_dict()}


def rank_counts(machine: Machine, most: int) -> list[int]:
    """Whole nodes: one, and always `GROWTH` times as many, up to the most."""
    counts, ranks = list[int](), machine.ranks_per_node
    while ranks < most:
        counts.append(ranks)
        ranks *= GROWTH
    return [*counts, most]


def scaling(config: Config, machine: Machine, counts: Sequence[int], *, vocab_size: int | None = None) -> list[Point]:
    """Both curves of a config. The weak one's batch is the config's on the fewest ranks where the model fits.

    Args:
        counts: of ranks, growing. Those on which no layout is legal, or none fits, are left out.
        vocab_size: where the config takes its tokenizer's.

    Raises:
        UserError: the model fits on none of them.
    """
    config, known = _as_long_as_any(config), MicroBatches()
    find = partial(search, machine=machine, top=1, vocab_size=vocab_size, known=known)
    first = next(_curve("strong", config, counts, find), None)
    if first is None:
        tried = [(ranks, find(config, ranks)) for ranks in reversed(counts)]
        ranks, found = next((each for each in tried if each[1].smallest is not None), tried[0])
        raise refusal(found, config, ranks, machine, vocab_size, option="--to")
    more = [ranks for ranks in counts if ranks > first.ranks]
    strong, weak = (_curve(kind, config, more, find, first) for kind in KINDS)
    return [first, *strong, replace(first, kind="weak"), *weak]


def _as_long_as_any(config: Config) -> Config:
    """The config of a run that is not over before anything of its own begins, however large its batches."""
    of_schedules = [config.schedule, *config.schedule.phases]
    of_schedules += [group.schedule for group in config.optimizer.groups if group.schedule is not None]
    named = [config.train.steps, *(stage.from_step for stage in config.batch.stages)]
    tokens = [stage.from_tokens for stage in config.batch.stages if stage.from_tokens is not None]
    named += [steps_for_tokens(config.batch, each) for each in tokens]
    for each in of_schedules:
        named += [each.warmup_steps, each.decay_steps, each.period_steps, getattr(each, "until_step", None)]
        named += each.milestones
    steps = max(LONG_RUN_STEPS, *(2 * step for step in named if step is not None))
    return config.model_copy(update={"train": config.train.model_copy(update={"tokens": None, "steps": steps})})


def without_layout(points: Sequence[Point], counts: Sequence[int]) -> list[str]:
    """The numbers of ranks that a curve has no point for, in a sentence each."""
    found = []
    for kind in KINDS:
        missing = sorted(set(counts) - {point.ranks for point in points if point.kind == kind})
        if missing:
            ranks = ", ".join(f"{each:,}" for each in missing)
            found.append(f"{kind} scaling has no point on {ranks} ranks: no layout fits, or divides the batch, there")
    return found


def _grown(batch: BatchConfig, times: Fraction) -> BatchConfig:
    """With so many times the sequences in every step, those of stages and of a ramp too; what begins after some tokens
    begins at the same step."""

    def grow(section: Section, *names: str) -> dict[str, int]:
        sizes = {name: getattr(section, name) for name in names}
        return {name: int(size * times) for name, size in sizes.items() if size is not None}

    def grown_stages() -> Iterator[Section]:
        for stage in batch.stages:
            yield stage.model_copy(update=grow(stage, "global_batch_size", "from_tokens"))

    changed: dict[str, Any] = {**grow(batch, "global_batch_size"), "stages": tuple(grown_stages())}
    if batch.ramp is not None:
        sizes = grow(batch.ramp, "start_size", "increment", "samples", "tokens")
        changed["ramp"] = batch.ramp.model_copy(update=sizes)
    if batch.noise_scale is not None:
        sizes = grow(batch.noise_scale, "max_batch_size")
        changed["noise_scale"] = batch.noise_scale.model_copy(update=sizes)
    return batch.model_copy(update=changed)


def _curve(
    kind: str,
    config: Config,
    counts: Sequence[int],
    find: Callable[[Config, int], Search],
    first: Point | None = None,
) -> Iterator[Point]:
    """The points on so many ranks, given the curve's first one; without it the first is the yardstick."""
    for ranks in counts:
        batch = config.batch
        if kind == "weak" and first is not None:
            batch = _grown(batch, Fraction(ranks, first.ranks))
        best = find(config.model_copy(update={"batch": batch}), ranks).best
        if best:
            rate = best[0].tokens_per_second / ranks
            yardstick = rate if first is None else first.best.tokens_per_second / first.ranks
            yield Point(kind, ranks, batch.global_batch_size, best[0], rate / yardstick)
