"""Schedules of one's own: three thousand mutations of good files, each run to the right end or refused by name."""

from __future__ import annotations

import itertools
import random

import pytest
import torch.distributed.pipelining.schedules as torch_schedules

from megalite.parallel.schedules.files import read_schedule, write_schedule
from megalite.parallel.schedules.kinds import SCHEDULES, find_schedule
from megalite.parallel.schedules.operations import PipelineSchedule, ScheduleError
from megalite.parallel.schedules.programs import make_programs
from megalite.parallel.schedules.proof import check_orders, prove
from tests.parallel.schedules import fake_stages

NUM_MUTATIONS = 3000


def schedules() -> list[PipelineSchedule]:
    found = []
    for name, pp, num_micro_batches in itertools.product(SCHEDULES, (2, 3, 4), (2, 4, 8)):
        if num_micro_batches >= SCHEDULES[name].least_micro_batches(pp):
            found.append(find_schedule(name, pp, num_micro_batches))
    return found


def test_written_and_read_again(tmp_path):
    for number, schedule in enumerate(schedules()):
        path = tmp_path / f"{number}.csv"
        path.write_text(write_schedule(schedule))
        assert read_schedule(path) == schedule


def test_torch_finds_them_right(tmp_path):
    """The check that torch's own pipelines make of a schedule, of ours as it reads them from the same file."""
    for schedule in schedules():
        lines = write_schedule(schedule).splitlines()
        actions = {
            rank: [torch_schedules._Action.from_str(each) for each in line.split(",")]
            for rank, line in enumerate(lines)
        }
        placement = schedule.placement
        torch_schedules._validate_schedule(actions, len(lines), placement.num_chunks, schedule.num_micro_batches)


def test_torch_writes_what_is_read(tmp_path):
    """A line of each form in torch's files: empty places, quoted cells, two passes at once."""
    path = tmp_path / "torch.csv"
    path.write_text('0F0,"0F1",,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n,1F0,1B0,1F1,1B1,1F2,1I2,1W2\n\n')
    schedule = read_schedule(path)
    assert [str(operation) for operation in schedule.orders[0]] == ["0F0", "0F1", "0F2", "0B0", "0B1", "0B2"]
    assert (schedule.num_micro_batches, schedule.placement.ranks, schedule.is_split) == (3, (0, 1), True)


def mutate(rows: list[list[str]], chance: random.Random) -> None:
    """One change of a place that somebody could make by hand."""
    row = chance.choice([each for each in rows if each])
    place = chance.randrange(len(row))
    what = chance.randrange(7)
    if what == 0:
        other = chance.randrange(len(row))
        row[place], row[other] = row[other], row[place]
    elif what == 1:
        row.insert(chance.randrange(len(row) + 1), row.pop(place))
    elif what == 2:
        chance.choice(rows).insert(0, row.pop(place))
    elif what == 3:
        row.pop(place)
    elif what == 4:
        row.insert(chance.randrange(len(row) + 1), row[place])
    elif what == 5:
        row[place] = row[place].replace(chance.choice("0123FBIW"), chance.choice("0123FBIWX-"))
    else:
        row[place : place + 1] = [row[place].replace("B", "I"), row[place].replace("B", "W")]


def test_mutations_are_right_or_refused(tmp_path):
    """Who is not refused computes what one rank computes, and ends where sends wait for their receivers."""
    chance, good, path = random.Random(17), [write_schedule(each) for each in schedules()], tmp_path / "mutated.csv"
    counts = {"ran": 0, "refused": 0}
    for _ in range(NUM_MUTATIONS):
        rows = [line.split(",") for line in chance.choice(good).splitlines()]
        for _ in range(chance.choice((1, 1, 2, 3))):
            mutate(rows, chance)
        path.write_text("".join(",".join(row) + "\n" for row in rows))
        try:
            schedule = read_schedule(path)
            check_orders(schedule)
            programs = make_programs(schedule)
            prove(programs, schedule.placement)
        except ScheduleError:
            counts["refused"] += 1
            continue
        wanted = fake_stages.expected(schedule.placement.num_chunks, schedule.num_micro_batches)
        assert fake_stages.run(programs, schedule.placement) == wanted, path.read_text()
        counts["ran"] += 1
    assert min(counts.values()) > NUM_MUTATIONS // 20, counts


@pytest.mark.parametrize(
    ("text", "complaint"),
    {
        "nothing": ("", "found no pass, expected a line for each rank, as in 0F0,0F1,0B0,0B1"),
        "a word": (
            "0F0,0X0\n",
            ":1: place 2: found '0X0', expected chunk, one of F, B, I, W, and micro-batch, as in 0F3",
        ),
        "a chunk left out": ("0F0,0B0\n2F0,2B0\n", "no rank does chunk 1; found chunks up to 2"),
        "an idle rank": ("0F0,0B0\n\n1F0,1B0\n", ":2: rank 1 has no chunk of its own"),
    }.values(),
    ids=lambda value: None,
)
def test_refused_in_words(tmp_path, text, complaint):
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises(ScheduleError) as caught:
        read_schedule(path)
    assert complaint in str(caught.value)


def test_a_cycle_names_the_passes(tmp_path):
    path = tmp_path / "cycle.csv"
    path.write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    schedule = read_schedule(path)
    with pytest.raises(ScheduleError, match="no rank can go on: rank 0 waits with 0B0 for 1B0 or 1I0; rank 1 "):
        make_programs(schedule)
