"""Schedules of every kind and size: they compute what one rank computes, end, and are as good as is known."""

from __future__ import annotations

import time

import pytest

from megalite.parallel.schedules.kinds import SCHEDULES, find_placement, find_schedule
from megalite.parallel.schedules.operations import Operation, PipelineSchedule, ScheduleError, make_schedule, place
from megalite.parallel.schedules.orders import forward_only, interleaved, one_f_one_b
from megalite.parallel.schedules.programs import Instruction, make_programs
from megalite.parallel.schedules.proof import check_kept, check_orders, kept_after, prove
from megalite.parallel.schedules.simulation import ChunkCosts, simulate
from tests.parallel.schedules import fake_stages

EVEN = ChunkCosts()


def make(name: str, pp: int, num_micro_batches: int, chunks: int | None = None) -> PipelineSchedule:
    return find_schedule(name, pp, num_micro_batches, chunks)


@pytest.mark.parametrize("name", SCHEDULES)
def test_computes_what_one_rank_computes(name):
    """Stages that count with integers, under a network where a send waits for its receiver."""
    for pp in (1, 2, 3, 4, 7):
        least = SCHEDULES[name].least_micro_batches(pp)
        for num_micro_batches in sorted({least, least + 1, 3 + least, 2 * pp + 1 + least, 4 * pp}):
            for chunks in (2, 3) if name == "interleaved" else (None,):
                schedule = make(name, pp, max(least, num_micro_batches), chunks)
                check_orders(schedule)
                programs = make_programs(schedule)
                prove(programs, schedule.placement)
                found = fake_stages.run(programs, schedule.placement)
                wanted = fake_stages.expected(schedule.placement.num_chunks, schedule.num_micro_batches)
                assert found == wanted, (pp, num_micro_batches, chunks)


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_stage_keeps_more_than_is_said(name):
    """And some step keeps as much, so that what is said is no more than it must be."""
    for pp in (2, 3, 5):
        for chunks in (2, 3, 4) if name == "interleaved" else (SCHEDULES[name].chunks,):
            counts = range(SCHEDULES[name].least_micro_batches(pp), 4 * pp)
            schedules = [make(name, pp, count, chunks) for count in counts]
            most = [[SCHEDULES[name].most_kept(pp, count, chunks, stage) for stage in range(pp)] for count in counts]
            kept = [[max(kept_after(order)) for order in schedule.orders] for schedule in schedules]
            assert all(a <= b for pair in zip(kept, most, strict=True) for a, b in zip(*pair, strict=True))
            assert [max(stage) for stage in zip(*kept, strict=True)] == [
                max(stage) for stage in zip(*most, strict=True)
            ]


@pytest.mark.parametrize("count", [0, 3, 5])
def test_costs_are_those_of_all_chunks(count):
    with pytest.raises(ValueError, match=f"{count} costs for a schedule of 4 chunks"):
        simulate(one_f_one_b(4, 8), (EVEN,) * count)


def test_who_keeps_too_much_is_named():
    with pytest.raises(ScheduleError, match="rank 0: with 0F2 it keeps 3 micro-batches, expected 2 at most"):
        check_kept(one_f_one_b(3, 8), [2, 2, 1])


@pytest.mark.parametrize("name", SCHEDULES)
def test_uneven_chunks(name):
    """A head that outweighs its blocks, and passes that take no time at all."""
    for pp in (2, 4):
        num_chunks = find_placement(name, pp, None).num_chunks
        for last in (ChunkCosts(5.0, 1.0, 0.0), ChunkCosts(0.0, 0.0, 0.0)):
            costs = (ChunkCosts(1.0, 1.5, 0.5),) * (num_chunks - 1) + (last,)
            schedule = find_schedule(name, pp, 2 * pp + 1)
            programs = make_programs(schedule, costs)
            prove(programs, schedule.placement)
            wanted = fake_stages.expected(num_chunks, schedule.num_micro_batches)
            assert fake_stages.run(programs, schedule.placement) == wanted


@pytest.mark.parametrize(("pp", "m"), [(2, 4), (4, 4), (4, 8), (8, 32)])
def test_bubbles_that_are_known(pp, m):
    """Backward passes of twice a forward pass: 1F1B waits (pp - 1) / (m + pp - 1) of the step, two chunks interleaved
    half of that against the work (Narayanan et al. 2021, section 2.2), ZB-H1 a third (Qi et al. 2023, table 1)."""
    wait = {
        name: simulate(s := make(name, pp, m), (EVEN,) * s.placement.num_chunks)
        for name in SCHEDULES
        if m >= SCHEDULES[name].least_micro_batches(pp)
    }
    assert wait["1f1b"].end == pytest.approx(3 * (m + pp - 1))
    assert wait["1f1b"].bubble == pytest.approx((pp - 1) / (m + pp - 1))
    assert wait["interleaved"].end == pytest.approx(3 * (2 * m + pp - 1))
    assert wait["zb-h1"].end == pytest.approx(3 * m + pp - 1)
    for name in wait.keys() & {"zb-v", "dualpipe-v"}:
        assert wait[name].bubble <= wait["zb-h1"].bubble + 1e-9


def torch_zb_v(pp: int, num_micro_batches: int) -> list[list[Operation]]:
    """The orders of torch's own ZB-V."""
    from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

    theirs = object.__new__(ScheduleZBVZeroBubble)  # it wants stages with weights, and reads no more than these of them
    theirs.pp_group_size, theirs.num_stages, theirs._n_microbatches = pp, 2 * pp, num_micro_batches
    kinds = {"FORWARD": "F", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    return [
        [
            Operation(kinds[action.computation_type.name], action.stage_index, action.microbatch_index)
            for action in theirs._calculate_single_rank_operations(rank)
            if action is not None
        ]
        for rank in range(pp)
    ]


@pytest.mark.parametrize("cost", [EVEN, ChunkCosts(1.0, 1.3, 0.9), ChunkCosts(1.0, 2.2, 0.9)])
def test_zb_v_waits_no_longer_than_torchs(cost):
    """Even chunks or with a head, and with recomputation; as many micro-batches as there are, or few."""
    for pp, m in [(2, 1), (2, 8), (3, 5), (4, 16), (8, 16)]:
        head = ChunkCosts(1.4 * cost.forward, 0.8 * cost.input_gradient, 0.8 * cost.weight_gradient)
        for costs in ((cost,) * 2 * pp, (cost,) * (2 * pp - 1) + (head,)):
            theirs = make_schedule(place("v", pp, 2), m, torch_zb_v(pp, m))
            assert simulate(make("zb-v", pp, m), costs).end <= simulate(theirs, costs).end + 1e-9


@pytest.mark.parametrize(("pp", "m"), [(2, 8), (4, 16), (8, 32)])
def test_memory_that_is_known(pp, m):
    """In micro-batches of a stage's layers: 1F1B keeps pp - s on stage s, a V with chunks half as large at most pp."""
    schedule = one_f_one_b(pp, m)
    assert simulate(schedule, (EVEN,) * pp).peaks == tuple(float(pp - stage) for stage in range(pp))
    whole = ChunkCosts(kept=0.5, held=0.5)
    assert max(simulate(make("zb-v", pp, m), (whole,) * 2 * pp).peaks) <= pp
    assert max(simulate(make("dualpipe-v", pp, m), (whole,) * 2 * pp).peaks) <= pp + 0.5


def test_evaluation_is_forward_passes_alone():
    placement = place("v", 3, 2)
    schedule = forward_only(placement, 4)
    prove(make_programs(schedule), placement)
    assert sorted(operation for order in schedule.orders for operation in order) == [
        Operation("F", chunk, micro_batch) for chunk in range(6) for micro_batch in range(4)
    ]


def test_a_large_pipeline_is_proven_at_once():
    """pp 16 x 4 chunks x 128 micro-batches, from nothing to the proof: under 3 s."""
    began = time.process_time()
    schedule = interleaved(16, 128, 4)
    check_orders(schedule)
    prove(make_programs(schedule), schedule.placement)
    assert time.process_time() - began < 3.0


def test_too_few_micro_batches():
    with pytest.raises(ScheduleError, match="at least 2 x pp = 8 micro-batches, found 7"):
        make("dualpipe-v", 4, 7)


class TestProofFinds:
    """What is wrong in programs, by name."""

    def programs(self) -> list[list[Instruction]]:
        return [list(program) for program in make_programs(one_f_one_b(2, 2))]

    def refusal(self, programs: list[list[Instruction]]) -> str:
        with pytest.raises(ScheduleError) as caught:
            prove([tuple(program) for program in programs], place("loop", 2, 1))
        return str(caught.value)

    def test_a_deadlock(self):
        """Two ranks that send to each other at once, which a network that buffers would hide."""
        programs = self.programs()
        first, second = programs
        send = next(each for each in first if str(each) == "send 0F1 to rank 1")
        receive = next(each for each in first if str(each) == "receive 1B0 from rank 1")
        other = next(each for each in second if str(each) == "receive 0F1 from rank 0")
        backward = next(each for each in second if str(each) == "send 1B0 to rank 0")
        first.remove(receive)
        first.insert(first.index(send) + 1, receive)
        second.remove(other)
        second.insert(second.index(backward) + 1, other)
        assert self.refusal(programs) == (
            "where a send waits for its receiver, no rank can go on: rank 0 waits with: send 0F1 to rank 1; rank 1 "
            "waits with: send 1B0 to rank 0"
        )

    def test_a_pass_before_its_input(self):
        programs = self.programs()
        programs[1].sort(key=lambda each: each.what != "do")
        assert self.refusal(programs) == "rank 1: 1F0 comes before 0F0, whose result it needs"

    def test_a_message_that_nobody_sends(self):
        programs = self.programs()
        programs[0] = [each for each in programs[0] if str(each) != "send 0F1 to rank 1"]
        assert self.refusal(programs) == (
            "the message of 0F1 from rank 0 to rank 1 is sent 0 times and received 1 times, expected once each"
        )
