"""The runner keeps to the simulated time: stages that take time instead of computing, over gloo.

By a clock of its own each rank's time is exact: passes move it on, a message carries its sender's, and who waits for
one is no earlier than that. By the wall's clock, where the stages sleep, what messages and Python cost is in it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite.engine import runner as runner_module
from megalite.engine.runner import ProgramRunner
from megalite.parallel.axes import connect
from megalite.parallel.mesh import Mesh
from megalite.parallel.schedules.kinds import SCHEDULES, find_placement, find_schedule
from megalite.parallel.schedules.operations import PipelineSchedule
from megalite.parallel.schedules.programs import SENDS_UNDER_WAY, make_programs
from megalite.parallel.schedules.simulation import ChunkCosts, simulate
from tests.kit.batches import step_batches
from tests.kit.spawn import run_ranks

SECONDS = 0.08
"""Of a unit of cost: long against what a message takes here, and what other processes take."""

TOLERANCE = 0.08
MOST_STEPS = 10
"""The fastest counts: what other processes take is not the runner's. It is over when that one is as simulated."""

HIDDEN = 8


class Sleep(torch.autograd.Function):
    """The identity, which takes its time on the way back; the half for weights is taken elsewhere when held back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stage: SleepingStage, costs: ChunkCosts) -> Tensor:
        ctx.stage, ctx.costs = stage, costs
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.stage.take(ctx.costs.input_gradient)
        ctx.stage.weight_gradient(ctx.costs.weight_gradient)
        return gradient, None, None


class SleepingStage(nn.Module):
    """Chunks whose passes take as long as they are said to.

    Args:
        take: lets so many units of time pass.
    """

    def __init__(self, costs: list[ChunkCosts], take: Callable[[float], None]):
        super().__init__()
        self.take = take
        self.weight = nn.Parameter(torch.ones(HIDDEN))
        self.spec = SimpleNamespace(
            tp=SimpleNamespace(size=1), sequence_parallel=False, model=SimpleNamespace(hidden_size=HIDDEN)
        )
        self._costs, self._held = costs, None

    def forward(self, x: Tensor, documents: object, targets: object, chunk: int) -> Tensor:
        self.take(self._costs[chunk].forward)
        if not x.is_floating_point():
            x = torch.ones(x.shape[0], HIDDEN) * self.weight
        y = Sleep.apply(x, self, self._costs[chunk])
        return y if targets is None else y.sum()

    def weight_gradient(self, cost: float) -> None:
        """Takes its time, now or when it is asked for."""
        if self._held is None:
            self.take(cost)
        else:
            self._held.append(cost)

    @contextmanager
    def hold_back(self) -> Iterator[list[float]]:
        self._held = []
        yield self._held
        self._held = None

    def make_held(self, held: list[float]) -> None:
        self.take(sum(held))


class Clock:
    """A rank's time, in units of cost. Stands for `dist` in the runner: messages carry their sender's."""

    Work = dist.Work

    def __init__(self) -> None:
        self.now = 0.0

    def take(self, cost: float) -> None:
        self.now += cost

    def isend(self, stream: Tensor, *others: Any) -> dist.Work | None:
        stream[0, 0] = self.now
        return dist.isend(stream, *others)

    def irecv(self, stream: Tensor, *others: Any) -> Any:
        work = dist.irecv(stream, *others)

        def wait() -> None:
            work.wait()
            self.now = max(self.now, stream[0, 0].item())

        return SimpleNamespace(wait=wait)


def largest(seconds: float) -> float:
    """Of all ranks."""
    told = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return told.item()


@dataclass
class Timed:
    """A schedule, what its chunks cost, and how long it takes by simulation, in units of cost."""

    schedule: PipelineSchedule
    costs: tuple[ChunkCosts, ...]
    end: float


def step_of(timed: Timed, take: Callable[[float], None]) -> Callable[[], object]:
    """A training step of this rank."""
    schedule, costs = timed.schedule, timed.costs
    axes = connect(Mesh(dist.get_world_size(), 1, 1, 1), dist.get_rank())
    chunks = schedule.placement.chunks_of(axes.pp.rank)
    stage = SleepingStage([costs[chunk] for chunk in chunks], take).double()
    runner = ProgramRunner(stage, axes, chunks, len(costs), hold_back=stage.hold_back, make_held=stage.make_held)  # type: ignore[arg-type]
    sizes = {"global_batch_size": schedule.num_micro_batches, "micro_batch_size": 1, "seq_len": 4}
    batches = step_batches(0, **sizes, dp=1, dp_rank=0, vocab_size=11)
    program = make_programs(schedule, costs)[axes.pp.rank]
    return lambda: runner.train(program, batches, 1.0)


def by_own_clock(schedules: list[Timed]) -> list[float]:
    """When the last rank has finished each schedule."""
    found = []
    for timed in schedules:
        clock = Clock()
        with patch.object(runner_module, "dist", clock):
            step_of(timed, clock.take)()
        found.append(largest(clock.now))
    return found


def by_wall_clock(schedules: list[Timed]) -> list[float]:
    """The same in units of cost: the fastest step of some."""
    found = []
    for timed in schedules:
        step = step_of(timed, lambda cost: time.sleep(cost * SECONDS))
        fastest = math.inf
        for _ in range(MOST_STEPS):
            dist.barrier()
            began = time.perf_counter()
            step()
            dist.barrier()
            fastest = min(fastest, largest(time.perf_counter() - began) / SECONDS)
            if fastest < timed.end * (1 + TOLERANCE):
                break
        found.append(fastest)
    return found


def schedules_of(pp: int, names: Sequence[str]) -> list[Timed]:
    """With a head that outweighs its blocks."""
    found = []
    for name in names:
        num_chunks = find_placement(name, pp, None).num_chunks
        share = pp / num_chunks
        blocks = ChunkCosts(share, 1.2 * share, 0.8 * share)
        costs = (blocks,) * (num_chunks - 1) + (ChunkCosts(share + 0.5, 1.2 * share, 0.8 * share),)
        schedule = find_schedule(name, pp, 2 * pp)
        found.append(Timed(schedule, costs, simulate(schedule, costs).end))
    return found


@pytest.mark.parametrize("pp", [2, 4])
def test_steps_are_as_simulated(pp):
    """Every kind of schedule, exactly."""
    schedules = schedules_of(pp, list(SCHEDULES))
    wanted = [timed.end for timed in schedules]
    for ends in run_ranks(by_own_clock, pp, schedules, backend="gloo"):
        assert ends == pytest.approx(wanted, rel=1e-9)


def test_steps_take_as_long_as_simulated():
    """By the wall's clock, over four stages: within 8 %."""
    schedules = schedules_of(4, list(SCHEDULES))
    wanted = [timed.end for timed in schedules]
    for ends in run_ranks(by_wall_clock, 4, schedules, backend="gloo"):
        assert ends == pytest.approx(wanted, rel=TOLERANCE)


def most_under_way(num_micro_batches: int) -> int:
    """Messages that a rank of two has begun to send in a step and not waited for, at most."""
    axes = connect(Mesh(2, 1, 1, 1), dist.get_rank())
    stage = SleepingStage([ChunkCosts(0.0, 0.0, 0.0)], lambda cost: None)
    counts = []

    class Watched(ProgramRunner):
        def _send(self, step: Any, *message: Any) -> None:
            super()._send(step, *message)
            counts.append(len(step.leaving))

    runner = Watched(
        stage,  # type: ignore[arg-type]
        axes,
        [axes.pp.rank],
        2,
        hold_back=stage.hold_back,
        make_held=stage.make_held,
    )
    sizes = {"global_batch_size": num_micro_batches, "micro_batch_size": 1, "seq_len": 4}
    batches = step_batches(0, **sizes, dp=1, dp_rank=0, vocab_size=11)
    schedule = find_schedule("1f1b", 2, num_micro_batches)
    runner.train(make_programs(schedule)[axes.pp.rank], batches, 1.0)
    return max(counts)


def test_messages_do_not_pile_up():
    """gloo keeps a message until it is waited for: however long the step, no more than some."""
    assert run_ranks(most_under_way, 2, 64, backend="gloo") == [SENDS_UNDER_WAY] * 2
