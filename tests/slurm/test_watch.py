"""Who holds a run up, how an attempt ended, and where the time went: from what ranks and Slurm leave behind."""

from __future__ import annotations

import json
import os
import time

import pytest

from megalite.errors import UserError
from megalite.slurm.detect import profile_from
from megalite.slurm.folder import LaunchFolder
from megalite.slurm.goodput import measure
from megalite.slurm.node_check import NodeReport, examine_node, unfit
from megalite.slurm.outcome import Next, judge, rank_ends
from megalite.slurm.watch import Patience, find_trouble
from megalite.train.heartbeat import START, Beat, Heart, beat_path, clock_of, read_beats

PATIENCE = Patience(beat=10, start=100, step=30)


def beat(step: int, *, time: float = 1000.0, phase: str = "train", since: float = 999.0) -> Beat:
    return Beat(time, step, phase, since)


def trouble(beats: dict[int, Beat], world_size: int, now: float = 1000.0):
    found = find_trouble(beats, world_size, started=900.0, now=now, patience=PATIENCE)
    return found and (found.ranks, found.why)


def test_all_is_well():
    """Fresh beats and a phase entered a second ago; ranks that have not begun are waited for."""
    assert trouble({0: beat(5), 1: beat(4)}, 2) is None
    assert trouble({0: beat(START, phase="start", since=950.0)}, 3) is None


def test_a_frozen_rank_is_named():
    """The only one without a beat, whatever the others wait for."""
    beats = {0: beat(7, since=980.0), 1: beat(7, time=985.0, since=984.0), 2: beat(7, since=980.0)}
    assert trouble(beats, 3) == ((1,), "no heartbeat for 15 s, last in step 7, train")


def test_the_rank_behind_is_named():
    """All beat and none moves on: the one in the earliest phase of the earliest step holds the others up."""
    beats = {0: beat(7, since=960.0), 1: beat(7, phase="data", since=950.0), 2: beat(7, since=960.0)}
    assert trouble(beats, 3) == ((1,), "no progress for 40 s: step 7, data")
    assert trouble({0: beat(8, since=960.0), 1: beat(7, since=965.0)}, 2) == (
        (1,),
        "no progress for 35 s: step 7, train",
    )
    assert trouble({rank: beat(7, since=960.0) for rank in range(2)}, 2)[1].endswith("(all ranks)")


def test_the_start_takes_longer_than_a_step():
    """Compilation and a large checkpoint are no hang; silence for longer than that is."""
    beats = {0: beat(START, phase="start", since=910.0), 1: beat(START, phase="start", since=920.0)}
    assert trouble(beats, 2) is None
    late = {rank: Beat(1025.0, START, "start", each.since) for rank, each in beats.items()}
    assert trouble(late, 2, now=1025.0) == ((0, 1), "no progress for 105 s: the start (all ranks)")
    assert trouble({0: beat(3, time=1004.0)}, 2, now=1005.0) == ((1,), "no sign of life in the 105 s since the start")


def test_a_heart_beats(tmp_path):
    """A file each second by the file system's clock; what is said and since when; no path, no file."""
    heart = Heart(beat_path(tmp_path, 3))
    first = read_beats(tmp_path)[3]
    assert (first.step, first.phase) == (START, "start")
    heart.enter("train", 7)
    deadline = time.monotonic() + 10
    while read_beats(tmp_path)[3].step != 7:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    found = read_beats(tmp_path)[3]
    assert found.phase == "train"
    assert abs(found.time - clock_of(tmp_path)) < 5
    assert 0 <= found.time - found.since < 5
    heart.stop()
    os.truncate(beat_path(tmp_path, 3), 5)
    assert read_beats(tmp_path) == {}
    Heart().enter("train", 1)


@pytest.mark.parametrize(
    ("code", "words", "errors", "expected"),
    [
        (0, "", [], (Next.FINISHED, "all ranks are done", ())),
        (3, "", [], (Next.STOPPED, "all ranks have stopped as asked", ())),
        (
            143,
            "srun: error: n2: task 3: Killed\nsrun: error: n1: tasks 0-2: Terminated\n",
            [{"rank": 0, "time": 2, "is_user_error": False, "message": "Traceback\nRuntimeError: reset by peer"}],
            (Next.RESTART, "rank 3 on n2: Killed", ("n2",)),
        ),
        (
            1,
            "srun: error: n1: tasks 0-1: Exited with exit code 1\n",
            [
                {"rank": 1, "time": 5, "is_user_error": False, "message": "late"},
                {"rank": 0, "time": 4, "is_user_error": False, "message": "Traceback\nValueError: first"},
            ],
            (Next.RESTART, "rank 0 failed first: ValueError: first", ()),
        ),
        (
            2,
            "srun: error: n1: task 0: Exited with exit code 2\n",
            [{"rank": 0, "time": 4, "is_user_error": True, "message": "disk full"}],
            (Next.GIVE_UP, "rank 0 found bad input", ()),
        ),
        (
            143,
            "srun: error: Node failure on n2\nsrun: error: n1: task 0: Terminated\n",
            [],
            (Next.RESTART, "node failure: n2", ("n2",)),
        ),
        (
            1,
            "srun: error: n3: task 1: Exited with exit code 1\n"
            "srun: launch/slurm: _step_signal: Terminating StepId=4.2\nsrun: error: n1: task 0: Killed\n",
            [{"rank": 1, "time": 4, "is_user_error": False, "message": "Traceback\nRuntimeError: no route"}],
            (Next.RESTART, "rank 1 failed first: RuntimeError: no route", ()),
        ),
        (
            1,
            "srun: error: Task launch for StepId=58.1 failed on node n3: Zero Bytes were transmitted or received\n"
            "srun: error: Application launch failed: Zero Bytes were transmitted or received\n"
            "srun: error: n1: task 0: Killed\nsrun: launch/slurm: _step_signal: Terminating StepId=58.1\n",
            [],
            (Next.RESTART, "tasks could not be started on n3: Zero Bytes were transmitted or received", ("n3",)),
        ),
        (
            7,
            "srun: error: n1: task 1: Exited with exit code 7\n",
            [],
            (Next.RESTART, "rank 1 on n1: Exited with exit code 7", ("n1",)),
        ),
        (1, "srun: error: Unable to create step\n", [], (Next.RESTART, "srun ended with exit code 1", ())),
    ],
)
def test_how_an_attempt_ended(code, words, errors, expected):
    """From srun's words as Slurm 22.05 writes them, and the ranks' own errors: the cause, not what it brought about."""
    found = judge(code, words, errors)
    assert (found.next, found.why, found.nodes) == expected


def test_lists_of_ranks():
    assert rank_ends("srun: error: n1: tasks 0-2,5: Killed")[0].ranks == (0, 1, 2, 5)


def report(node: str, **changes) -> NodeReport:
    values = {
        "num_gpus": 8,
        "memory_gb": 80.0,
        "gflops": 700.0,
        "disk_mb_per_second": 900.0,
        "clock_error_seconds": 0.1,
    }
    return NodeReport(node=node, address="", **{**values, **changes})


def test_nodes_that_fall_behind_are_named():
    """With their figures and the others'."""
    reports = {f"n{number}": report(f"n{number}") for number in range(4)}
    assert unfit(reports, 8) == {}
    reports |= {
        "slow": report("slow", gflops=200.0),
        "few": report("few", num_gpus=7),
        "disk": report("disk", disk_mb_per_second=50.0),
        "clock": report("clock", clock_error_seconds=-90.0),
        "silent": None,
    }
    assert unfit(reports, 8) == {
        "slow": "200 GFLOP/s, the median node has 700",
        "few": "7 GPUs answer, 8 are needed",
        "disk": "writes 50 MB/s, the median node 900",
        "clock": "its clock is -90 s off",
        "silent": "did not answer",
    }
    assert unfit({"n1": None}, 0) == {"n1": "did not answer"}


def test_this_machine_is_examined(tmp_path):
    """Every figure is one; nothing is left in the folder but a clock's file."""
    found = examine_node(tmp_path)
    assert found.gflops > 0
    assert found.memory_gb > 0
    assert found.disk_mb_per_second > 0
    assert abs(found.clock_error_seconds) < 5
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".clock")] == []


def test_a_profile_from_sinfo():
    """The default partition or the one asked for; the most frequent kind of node; GPUs in all of sinfo's spellings."""
    lines = [
        "cpu*|up|infinite|64|(null)|10",
        "gpu|up|2-00:00:00|96|gpu:h100:8(S:0-1)|40",
        "gpu|up|2-00:00:00|48|gpu:4|2",
        "old|down|1:00:00|8|gpu:2|3",
    ]
    found = profile_from(lines, None)
    assert (found.partition, found.gpus_per_node, found.time_limit) == ("cpu", 0, "24:00:00")
    found = profile_from(lines, "gpu")
    assert (found.gpus_per_node, found.cpus_per_rank, found.time_limit) == (8, 12, "2-00:00:00")
    with pytest.raises(UserError, match=r"no partition 'old' that is up; there are cpu, gpu, old"):
        profile_from(lines, "old")


def test_where_the_time_went(tmp_path):
    """Two attempts, the first of which lost five of its fifteen steps: seconds add up to the whole."""
    folder = LaunchFolder(tmp_path)
    folder.path.mkdir()
    own = [
        {"time": 100, "event": "launched", "job": "1"},
        {"time": 110, "event": "job", "job": "1"},
        {"time": 120, "event": "attempt", "attempt": 1, "job": "1", "nodes": ["a", "b"]},
        {"time": 170, "event": "end", "attempt": 1, "last_step": 15, "why": "node failure: b"},
        {"time": 180, "event": "attempt", "attempt": 2, "job": "1", "nodes": ["a", "c"]},
        {"time": 280, "event": "end", "attempt": 2, "last_step": 30, "why": "all ranks are done"},
        {"time": 280, "event": "finished"},
    ]
    run = [
        {"time": 135, "event": "start", "step": 0, "attempt": 1},
        {"time": 160, "event": "save", "step": 10, "stalled_seconds": 5.0},
        {"time": 200, "event": "start", "step": 10, "attempt": 2},
        {"time": 280, "event": "save", "step": 30, "stalled_seconds": 2.0},
    ]
    folder.events.write_text("".join(json.dumps(event) + "\n" for event in own))
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in run))
    found = measure(folder, now=1000.0)
    first, second = found.attempts
    assert (first.total, first.starting, first.saving, first.lost) == (50, 15, 5, pytest.approx(30 * 5 / 15))
    assert (second.total, second.starting, second.saving, second.lost) == (100, 20, 2, 0)
    assert found.total == 180
    assert found.waiting == 30
    parts = sum(each.computing + each.starting + each.saving + each.lost for each in found.attempts)
    assert parts + found.waiting == pytest.approx(found.total)
    assert found.share == pytest.approx((20 + 78) / 180)
