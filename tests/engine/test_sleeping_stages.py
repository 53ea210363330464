"""The runner keeps to the simulated time: stages that sleep instead of computing, over gloo."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite.engine.runner import ProgramRunner
from megalite.parallel.axes import connect
from megalite.parallel.mesh import Mesh
from megalite.parallel.schedules.kinds import find_placement, find_schedule
from megalite.parallel.schedules.operations import PipelineSchedule
from megalite.parallel.schedules.programs import SENDS_UNDER_WAY, make_programs
from megalite.parallel.schedules.simulation import ChunkCosts, simulate
from tests.kit.batches import step_batches
from tests.kit.spawn import run_ranks

SECONDS = 0.03
"""Of a unit of cost: long against what a message takes here."""

TOLERANCE = 0.08
MOST_STEPS = 10
"""The fastest counts: what other processes take is not the runner's. It is over when that one is as simulated."""

HIDDEN = 8


class Sleep(torch.autograd.Function):
    """The identity, which takes its time on the way back; the half for weights is slept elsewhere when held back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stage: SleepingStage, costs: ChunkCosts) -> Tensor:
        ctx.stage, ctx.costs = stage, costs
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.costs.input_gradient * SECONDS)
        ctx.stage.weight_gradient(ctx.costs.weight_gradient * SECONDS)
        return gradient, None, None


class SleepingStage(nn.Module):
    """Chunks that sleep as long as they are said to take."""

    def __init__(self, costs: list[ChunkCosts]):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))
        self.spec = SimpleNamespace(
            tp=SimpleNamespace(size=1), sequence_parallel=False, model=SimpleNamespace(hidden_size=HIDDEN)
        )
        self._costs, self._held = costs, None

    def forward(self, x: Tensor, documents: object, targets: object, chunk: int) -> Tensor:
        time.sleep(self._costs[chunk].forward * SECONDS)
        if not x.is_floating_point():
            x = torch.ones(x.shape[0], HIDDEN) * self.weight
        y = Sleep.apply(x, self, self._costs[chunk])
        return y if targets is None else y.sum()

    def weight_gradient(self, seconds: float) -> None:
        """Sleep, now or when it is asked for."""
        if self._held is None:
            time.sleep(seconds)
        else:
            self._held.append(seconds)

    @contextmanager
    def hold_back(self) -> Iterator[list[float]]:
        self._held = []
        yield self._held
        self._held = None

    def make_held(self, held: list[float]) -> None:
        time.sleep(sum(held))


def largest(seconds: float) -> float:
    """Of all ranks."""
    told = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return told.item()


def measured(
    schedules: list[PipelineSchedule], costs: list[tuple[ChunkCosts, ...]], wanted: list[float]
) -> list[float]:
    """The seconds of a step of each schedule, over all ranks: the fastest of some."""
    pp = dist.get_world_size()
    axes = connect(Mesh(pp, 1, 1, 1), dist.get_rank())
    found = []
    for schedule, each, simulated in zip(schedules, costs, wanted, strict=True):
        chunks = schedule.placement.chunks_of(axes.pp.rank)
        stage = SleepingStage([each[chunk] for chunk in chunks])
        runner = ProgramRunner(stage, axes, chunks, len(each), hold_back=stage.hold_back, make_held=stage.make_held)  # type: ignore[arg-type]
        sizes = {"global_batch_size": schedule.num_micro_batches, "micro_batch_size": 1, "seq_len": 4}
        batches = step_batches(0, **sizes, dp=1, dp_rank=0, vocab_size=11)
        program = make_programs(schedule, each)[axes.pp.rank]
        fastest = math.inf
        for _ in range(MOST_STEPS):
            dist.barrier()
            began = time.perf_counter()
            runner.train(program, batches, 1.0)
            dist.barrier()
            fastest = min(fastest, largest(time.perf_counter() - began))
            if fastest < simulated * (1 + TOLERANCE):
                break
        found.append(fastest)
    return found


def test_steps_take_as_long_as_simulated():
    """Each schedule over four stages, with a head that outweighs its blocks: within 8 %."""
    pp = 4
    schedules, costs, wanted = [], [], []
    for name in ("1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"):
        num_chunks = find_placement(name, pp, None).num_chunks
        share = pp / num_chunks
        blocks = ChunkCosts(share, 1.2 * share, 0.8 * share)
        each = (blocks,) * (num_chunks - 1) + (ChunkCosts(share + 0.5, 1.2 * share, 0.8 * share),)
        schedules.append(find_schedule(name, pp, 2 * pp))
        costs.append(each)
        wanted.append(simulate(schedules[-1], each).end * SECONDS)
    for seconds in run_ranks(measured, pp, schedules, costs, wanted, backend="gloo"):
        assert seconds == pytest.approx(wanted, rel=TOLERANCE)


def most_under_way(num_micro_batches: int) -> int:
    """Messages that a rank of two has begun to send in a step and not waited for, at most."""
    axes = connect(Mesh(2, 1, 1, 1), dist.get_rank())
    stage = SleepingStage([ChunkCosts(0.0, 0.0, 0.0)])
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
