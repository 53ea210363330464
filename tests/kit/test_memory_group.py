"""The tests' own collectives do what gloo's do."""

from __future__ import annotations

from datetime import timedelta
from itertools import chain

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from tests.kit import memory_group
from tests.kit.board import SLOT_BYTES
from tests.kit.spawn import RanksFailed, run_ranks

SIZES = (0, 1, 7, SLOT_BYTES // 4 + 3)
"""Numbers in a message; the last one takes two slots."""

REDUCTIONS = (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MAX, dist.ReduceOp.MIN)


def numbers(size: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """Small whole numbers, others on each rank: their sums are exact in every format."""
    generator = torch.Generator().manual_seed(31 * dist.get_rank() + salt)
    return torch.randint(-3, 4, (size,), generator=generator).to(dtype)


def reductions() -> list[torch.Tensor]:
    found = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8):
        for size in SIZES:
            for operation in REDUCTIONS:
                x = numbers(size, dtype).abs()
                dist.all_reduce(x, op=operation)
                y = numbers(size, dtype).abs()
                dist.reduce(y, 1, op=operation)
                found += [x, y if dist.get_rank() == 1 else x]
    strided = numbers(24, torch.float32).view(4, 6).t()
    dist.all_reduce(strided)
    pending = numbers(5, torch.float32)
    work = dist.all_reduce(pending, async_op=True)
    work.wait()
    return [*found, strided, pending]


def exchanges() -> list[torch.Tensor]:
    world, rank = dist.get_world_size(), dist.get_rank()
    found = []
    for size in SIZES[1:]:
        x = numbers(size, torch.float32)
        everyone = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(everyone, x)
        joined = torch.empty(world * size)
        dist.all_gather_into_tensor(joined, x)
        whole = numbers(world * size, torch.float32)
        part = torch.empty(size)
        dist.reduce_scatter_tensor(part, whole)
        parts = [torch.empty_like(x) for _ in range(world)] if rank == 0 else None
        dist.gather(x, parts)
        told = numbers(size, torch.int64)
        dist.broadcast(told, world - 1)
        found += [*everyone, joined, part, *(parts or []), told]
    rows = [(rank + to) % 3 for to in range(world)]
    arriving = [(source + rank) % 3 for source in range(world)]
    outgoing, incoming = numbers(2 * sum(rows), torch.float32).view(-1, 2), torch.empty(sum(arriving), 2)
    dist.all_to_all_single(incoming, outgoing, arriving, rows)
    equal = torch.empty(2 * world)
    dist.all_to_all_single(equal, numbers(2 * world, torch.float32))
    dist.barrier()
    return [*found, incoming, equal]


def functional_ones() -> list[torch.Tensor]:
    group, world = dist.group.WORLD, dist.get_world_size()
    x = numbers(world * 6, torch.float32).view(world, 6)
    calls = (
        functional.all_reduce(x, "sum", group),
        functional.reduce_scatter_tensor(x, "sum", 0, group),
        functional.all_gather_tensor(x, 0, group),
    )
    return [functional.wait_tensor(each) for each in calls]


def objects_and_groups() -> list[object]:
    world, rank = dist.get_world_size(), dist.get_rank()
    told: list[object] = [{"rank": rank}]
    dist.broadcast_object_list(told, src=1)
    everyone: list[object] = [None] * world
    dist.all_gather_object(everyone, ("x" * rank, rank))
    pairs = [dist.new_group([first, first + 1]) for first in range(0, world, 2)]
    x = torch.tensor([float(rank)])
    dist.all_reduce(x, group=pairs[rank // 2])
    y = torch.tensor([float(rank)])
    dist.broadcast(y, 2 * (rank // 2) + 1, group=pairs[rank // 2])
    return [told, everyone, x.item(), y.item()]


def messages() -> list[torch.Tensor]:
    """To both neighbours at once, two of each, received in another order than they were sent in."""
    world, rank = dist.get_world_size(), dist.get_rank()
    neighbours = sorted({(rank + 1) % world, (rank - 1) % world})
    sent, received = [], {}
    for to in neighbours:
        for tag in (0, 1):
            sent.append(dist.isend(numbers(50, torch.bfloat16, salt=tag), to, tag=tag))
    for source in neighbours:
        for tag in (1, 0):
            x = torch.empty(50, dtype=torch.bfloat16)
            received[source, tag] = x, dist.irecv(x, source, tag=tag)
    for work in [*sent, *(work for _, work in received.values())]:
        work.wait()
    last = torch.zeros(3)
    if rank == 0:
        dist.send(torch.arange(3.0), 1)
    elif rank == 1:
        dist.recv(last, 0)
    return [*(x for x, _ in received.values()), last]


PROGRAMS = (reductions, exchanges, functional_ones, objects_and_groups, messages)


def all_results() -> list[list]:
    return [program() for program in PROGRAMS]


def test_equals_gloo():
    """Every collective and message, in every format that training has, bit for bit on every rank."""
    ours = run_ranks(all_results, 4)
    theirs = run_ranks(all_results, 4, backend="gloo")
    for program, *results in zip(PROGRAMS * 4, chain(*ours), chain(*theirs), strict=True):
        mine, other = results
        assert len(mine) == len(other) > 0
        for x, y in zip(mine, other, strict=True):
            assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y, program.__name__


def a_rank_is_missing() -> None:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=0.5))
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), group=group)


def test_a_missing_rank_is_an_error():
    """Who waits in vain says so after the group's time, as with gloo."""
    with pytest.raises(RanksFailed, match="TimeoutError: another rank is not there after 0 s"):
        run_ranks(a_rank_is_missing, 2)


def averages() -> torch.Tensor:
    x = torch.full((3,), float(dist.get_rank()))
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    return x


def test_averages():
    """What gloo has not for all formats is the mean here."""
    assert all(torch.equal(x, torch.full((3,), 1.5)) for x in run_ranks(averages, 4))


def test_the_backend_is_known_by_its_name():
    """Registering twice is registering once."""
    memory_group.register()
    memory_group.register()
    assert memory_group.NAME in dist.Backend.backend_list
