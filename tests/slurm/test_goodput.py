"""Where the time of a run went, by a clock that stops when heartbeats do."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megalite.slurm.controller import QueuedJob
from megalite.slurm.folder import LaunchFolder
from megalite.slurm.goodput import measure
from megalite.slurm.stall import StallTracker, find_stall
from megalite.slurm.wait_reason import find_wait_reason
from megalite.train.heartbeat import BEAT_BYTES, DONE, START, Beat, beat_path
from megalite.train.in_place import write_in_place


def beat(time: float, step: int, phase: str, since: float, step_seconds: float = 1.0) -> Beat:
    return Beat(time, step, phase, since, step_seconds)


def leave_beats(folder: LaunchFolder, attempt: int, *beats: Beat) -> None:
    """The last heartbeats of an attempt's ranks, as files."""
    home = folder.attempt(attempt) / "beats"
    home.mkdir(parents=True)
    for rank, each in enumerate(beats):
        content = {"step": each.step, "phase": each.phase, "age": each.time - each.since}
        content |= {"step_seconds": each.step_seconds, "product_seconds": 0.0}
        write_in_place(beat_path(home, rank), content, BEAT_BYTES)
        os.utime(beat_path(home, rank), (each.time, each.time))


def write_events(tmp_path: Path, own: list[dict], run: list[dict]) -> LaunchFolder:
    folder = LaunchFolder(tmp_path)
    folder.path.mkdir()
    folder.events.write_text("".join(json.dumps(event) + "\n" for event in own))
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in run))
    return folder


def test_where_the_time_went(tmp_path):
    """Two attempts, the first of which lost five of its fifteen steps, and stood still for ten seconds until the loss
    was noticed: seconds add up to the whole."""
    own = [
        {"time": 100, "event": "launched", "job": "1"},
        {"time": 110, "event": "job", "job": "1"},
        {"time": 120, "event": "attempt", "attempt": 1, "job": "1", "nodes": ["a", "b"]},
        {"time": 170, "event": "end", "attempt": 1, "last_step": 15, "why": "node failure: b"},
        {"time": 180, "event": "attempt", "attempt": 2, "job": "1", "nodes": ["a", "c"]},
        {"time": 240, "event": "standstill", "attempt": 2, "since": 225, "seconds": 15, "why": "rank 1"},
        {"time": 280, "event": "end", "attempt": 2, "last_step": 30, "why": "all ranks are done"},
        {"time": 280, "event": "finished"},
    ]
    run = [
        {"time": 135, "event": "start", "step": 0, "attempt": 1},
        {"time": 150, "event": "save", "step": 10, "stalled_seconds": 5.0},
        {"time": 200, "event": "start", "step": 10, "attempt": 2},
        {"time": 250, "event": "validation", "step": 20, "seconds": 3.0},
        {"time": 280, "event": "save", "step": 30, "stalled_seconds": 2.0},
    ]
    folder = write_events(tmp_path, own, run)
    leave_beats(folder, 1, beat(168, 15, "train", 160), beat(161, 15, "data", 159))
    leave_beats(folder, 2, beat(280, 30, DONE, 280), beat(280, 30, DONE, 279))
    found = measure(folder, now=1000.0)
    first, second = found.attempts
    assert first.parts() == {
        "computing": pytest.approx(20 - 20 * 5 / 15),
        "starting": 15,
        "validating": 0,
        "saving": 5,
        "standing still": pytest.approx(10),
        "lost": pytest.approx(20 * 5 / 15),
    }
    assert (second.total, second.starting, second.saving, second.validating, second.stalled) == (100, 20, 2, 3, 15)
    assert (second.lost, second.computing) == (0, 60)
    assert (found.total, found.waiting) == (180, 30)
    assert sum(sum(each.parts().values()) for each in found.attempts) + found.waiting == pytest.approx(found.total)
    assert found.share == pytest.approx((first.computing + 60) / 180)


@pytest.mark.parametrize("kind", ["gave up", "gave_up"])
def test_a_run_that_gave_up_is_over(tmp_path, kind):
    """Its time ends there, also where an older version wrote so."""
    own = [{"time": 100, "event": "launched", "job": "1"}, {"time": 160, "event": kind, "why": "no progress"}]
    assert measure(write_events(tmp_path, own, []), now=500.0).total == 60


def test_a_dead_run_does_not_compute(tmp_path):
    """Whose supervisor died with it, so that nobody wrote down an end: a run dead for 122 of 176 s had 76 % of its time
    counted as steps."""
    own = [
        {"time": 1000, "event": "launched", "job": "1"},
        {"time": 1002, "event": "attempt", "attempt": 1, "job": "1", "nodes": ["a", "b"]},
    ]
    folder = write_events(tmp_path, own, [{"time": 1014, "event": "start", "step": 0, "attempt": 1}])
    leave_beats(folder, 1, beat(1054, 80, "train", 1054), beat(1054, 80, "train", 1053.5))
    found = measure(folder, now=1176.0)
    assert found.attempts[0].stalled == pytest.approx(122)
    assert found.share == pytest.approx(40 / 176)
    assert measure(folder, now=1055.0).attempts[0].stalled == 0, "a step is being done"


def test_an_attempt_whose_supervisor_ended_first(tmp_path):
    """The next job's begin is its end, and nothing was computed since its ranks last moved; stale ones may move on."""
    own = [
        {"time": 0, "event": "launched", "job": "1"},
        {"time": 0, "event": "attempt", "attempt": 1, "job": "1", "nodes": ["a"]},
        {"time": 100, "event": "job", "job": "2"},
        {"time": 100, "event": "attempt", "attempt": 2, "job": "2", "nodes": ["b"]},
    ]
    folder = write_events(tmp_path, own, [{"time": 10, "event": "start", "step": 0, "attempt": 1}])
    leave_beats(folder, 1, beat(60, 50, "train", 60))
    assert measure(folder, now=150.0).attempts[0].stalled == pytest.approx(40)
    os.utime(beat_path(folder.attempt(1) / "beats", 0), (140, 140))
    assert measure(folder, now=150.0).attempts[0].stalled == 0
    folder.add_event("end", job="1", attempt=1, last_step=60, why="refused")
    found = measure(folder, now=150.0)
    assert (found.attempts[0].total, found.waiting) == (100, 0), "both at once are counted once"
    with open(folder.events, "a") as file:
        for event in ("finished", "end"):  # of the second job, and what a stale supervisor writes after that
            file.write(json.dumps({"time": 190, "event": event, "attempt": 1, "why": ""}) + "\n")
    assert measure(folder, now=500.0).total == 190


WELL = {0: beat(100, 7, "train", 99), 1: beat(100, 7, "train", 99.5)}


@pytest.mark.parametrize(
    ("beats", "now", "expected"),
    [
        (WELL, 101, None),
        (WELL | {1: beat(90, 7, "train", 89)}, 101, (90, "rank 1: no heartbeat, last in step 7, train")),
        ({0: beat(120, 7, "train", 99), 1: beat(120, 7, "data", 98)}, 120.5, (99, "rank 1: in step 7, data")),
        ({rank: beat(120, 7, "train", 99) for rank in range(4)}, 120.5, (99, "all ranks: in step 7, train")),
        ({rank: beat(120, 7, "train", 99, 30.0) for rank in range(2)}, 120.5, None),
        ({rank: beat(120, 7, "validate", 99) for rank in range(2)}, 120.5, None),
        ({0: beat(120, START, "start", 20), 1: beat(120, START, "start", 20)}, 120.5, None),
        ({0: beat(100, 7, DONE, 99)}, 500, None),
        ({}, 500, None),
    ],
)
def test_what_is_a_standstill(beats, now, expected):
    """A rank without a sign, or none that moves for much longer than a step takes; a start, a validation and an end are
    none."""
    found = find_stall(beats, now)
    assert (found and (found.since, found.why)) == expected


def test_a_standstill_is_told_once_with_its_length():
    """When it begins, and when it is over, whatever it is called meanwhile; two do not count the same seconds."""
    tracker = StallTracker()
    assert tracker.update(WELL, 101) == (None, None)
    began, ended = tracker.update(WELL, 110)
    assert (began.since, ended) == (100, None)
    assert tracker.update({0: beat(111, 7, "train", 99), 1: beat(90, 7, "train", 89)}, 111) == (None, None)
    assert tracker.update({rank: beat(112, 8, "train", 112) for rank in range(2)}, 112) == (
        None,
        {"since": 100, "seconds": 12, "why": began.why},
    )
    tracker.update(WELL, 113)
    _, ended = tracker.update({rank: beat(114, 9, "train", 114) for rank in range(2)}, 114)
    assert (ended["since"], ended["seconds"]) == (112, 2)


RUNNING, PENDING = QueuedJob("4", "RUNNING", "None"), QueuedJob("5", "PENDING", "Resources")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"jobs": None}, None),
        ({"jobs": []}, ("someone to launch it again", 100)),
        ({"jobs": [PENDING]}, ("nodes for job 5 (Resources)", 50)),
        ({"jobs": [QueuedJob("4", "COMPLETING", "None"), PENDING]}, ("nodes for job 5 (Resources)", 50)),
        ({"alive": 60}, ("a sign of life of the supervisor, job 4", 60)),
        ({"said": {"for": "the disk: full", "since": 70}}, ("the disk: full", 70)),
        ({"state": {"status": "waiting"}}, ("the next job to begin", 50)),
        ({"state": {"status": "submitted"}, "attempt_began": None, "beats": {}}, ("job 4 to begin", 50)),
        ({"beats": {0: WELL[0]}}, ("rank 1 to start", 40)),
        ({"beats": {}, "world_size": 64}, ("rank 0, rank 1 and 62 more to start", 40)),
        ({"beats": WELL | {1: beat(90, 7, "train", 89)}}, ("rank 1: no heartbeat", 90)),
        ({"beats": {rank: beat(100, START, "start", 41) for rank in range(2)}}, ("rank 0, rank 1 to import", 40)),
    ],
)
def test_what_a_run_waits_for(changes, expected):
    """Asked from the outside in, with since when; a supervisor's last words do not count when it is dead."""
    state = {"status": "running", "job": "4", "time": 50, **changes.pop("state", {})}
    settings = {"jobs": [RUNNING, PENDING], "beats": WELL, "world_size": 2, "alive": 100, "attempt_began": 40}
    settings |= {"said": None, **changes}
    said, jobs, beats = (settings.pop(name) for name in ("said", "jobs", "beats"))
    found = find_wait_reason(state, said, jobs, beats, now=101.0, **settings)
    if expected is None:
        assert found is None
    else:
        assert found.what.startswith(expected[0])
        assert found.since == expected[1]
