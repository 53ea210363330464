"""Whether the next job of a chain goes on, when the former one may still be at work on its end."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from megalite.slurm import succession
from megalite.slurm.folder import LaunchFolder
from megalite.slurm.succession import find_end_of_chain
from megalite.train.heartbeat import Heartbeat


class SlurmSays:
    """A controller that knows one former job: what it answers, time after time; the last answer stays."""

    def __init__(self, *states: str):
        self._states = list(states)

    def is_ending(self, job: str) -> bool:
        assert job == "7"
        state = self._states.pop(0) if len(self._states) > 1 else self._states[0]
        return state == "COMPLETING"

    def was_cancelled(self, job: str) -> bool:
        assert job == "7"
        return self._states[0] in ("CANCELLED", "COMPLETING")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> LaunchFolder:
    """Of a run whose job 7 runs, as far as anybody has said."""
    monkeypatch.setattr(succession, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(succession, "SILENCE_SECONDS", 2.0)
    folder = LaunchFolder(tmp_path)
    folder.write_state(job="7", status="running")
    return folder


def after(seconds: float, do: Callable[[], object]) -> None:
    threading.Timer(seconds, do).start()


@pytest.mark.parametrize("status", ["finished", "stopped", "gave up", "cancelled"])
def test_what_the_former_supervisor_says_in_the_end_is_waited_for(folder, status):
    """It lives and Slurm ends its job: what it writes at last counts, whoever ended it."""
    heartbeat = Heartbeat(folder.alive)
    after(0.3, lambda: folder.write_state(status=status))
    assert find_end_of_chain(folder, "8", SlurmSays("COMPLETING")) == (status, "as job 7 has said")
    heartbeat.stop()


def test_a_run_that_is_handed_on_goes_on(folder):
    """The usual way: at the time limit, or preempted."""
    heartbeat = Heartbeat(folder.alive)
    after(0.3, lambda: folder.write_state(status="waiting"))
    assert find_end_of_chain(folder, "8", SlurmSays("COMPLETING")) is None
    heartbeat.stop()


@pytest.mark.parametrize(
    ("states", "end"),
    [
        (("CANCELLED",), ("cancelled", "scancel of job 7")),
        (("COMPLETING", "COMPLETING", "CANCELLED"), ("cancelled", "scancel of job 7")),
        (("NODE_FAIL",), None),
        (("COMPLETING", "NODE_FAIL"), None),
        (("",), None),
    ],
)
def test_a_supervisor_that_never_speaks(folder, states, end):
    """Slurm says who ended its job; one that it has forgotten, or whose node died, was not cancelled."""
    heartbeat = Heartbeat(folder.alive)
    assert find_end_of_chain(folder, "8", SlurmSays(*states)) == end
    heartbeat.stop()


def test_a_dead_node_is_not_waited_for_long(folder, monkeypatch):
    """Its job may be COMPLETING for minutes, without a sign of life."""
    monkeypatch.setattr(succession, "SILENCE_SECONDS", 0.1)
    Heartbeat(folder.alive).stop()
    assert find_end_of_chain(folder, "8", SlurmSays("COMPLETING")) is None


@pytest.mark.parametrize("kind", ["supervisor_lost", "supervisor_cut_off"])
def test_a_watchdog_cancels_one_job_and_not_the_chain(folder, kind):
    """It uses scancel, as a person does, but leaves an event first."""
    folder.add_event(kind, job="7", why="no sign of it for 10 s; the job is cancelled", excluded=[])
    assert find_end_of_chain(folder, "8", SlurmSays("CANCELLED")) is None


@pytest.mark.parametrize("state", [{"job": "8", "status": "submitted"}, {"job": "7", "status": "submitted"}])
def test_a_launch_begins_a_new_chain(folder, state):
    """Its first job is written down, or about to be; how the former chain ended is nothing to it."""
    folder.write_state(**state)
    assert find_end_of_chain(folder, "8", SlurmSays("CANCELLED")) is None


def test_the_first_job_of_all(tmp_path):
    """Nothing stands there yet."""
    assert find_end_of_chain(LaunchFolder(tmp_path), "8", SlurmSays("CANCELLED")) is None
