"""Which nodes Slurm has lost sight of, asked beside the watch over the ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from megalite.errors import UserError
from megalite.slurm import controller as controller_module
from megalite.slurm.controller import Controller, NodeStatePoller
from megalite.slurm_commands import NoAnswer

NODES = ("node01", "node02")
LONGEST_CALL_SECONDS = 0.2


@pytest.fixture
def sinfo(monkeypatch) -> Callable[[object], None]:
    """Sets what Slurm answers from now on: lines, or an error."""
    answers: list[object] = []

    def ask(command: list[str]) -> str:
        assert command[0] == "sinfo"
        answer = answers[-1]
        if isinstance(answer, Exception):
            raise answer
        return answer() if callable(answer) else answer

    monkeypatch.setattr(controller_module, "ask", ask)
    return answers.append


def found(node_states: NodeStatePoller, seconds: float = 0.3) -> list[str]:
    """All that it says within some time."""
    lost, deadline = [], time.monotonic() + seconds
    while time.monotonic() < deadline:
        lost += node_states.newly_unresponsive(NODES)
        time.sleep(0.01)
    return lost


def test_a_node_is_named_once_and_again_when_it_was_back(sinfo):
    reach = NodeStatePoller(Controller(), every_seconds=0.02)
    sinfo("node01 mix\nnode02 mix\n")
    assert found(reach) == []
    sinfo("node01 mix\nnode02 mix*\n")
    assert found(reach) == ["node02"]
    sinfo("node01 mix\nnode02 mix\n")
    assert found(reach) == []
    sinfo("node01 alloc*\nnode02 down*\n")
    assert found(reach) == ["node01", "node02"]


def test_the_last_answer_counts_while_slurm_is_away(sinfo):
    """What was wrong with a node then is wrong now; nothing is before the first answer."""
    reach = NodeStatePoller(Controller(), every_seconds=0.02)
    assert all(reach.is_good(node) for node in NODES)
    sinfo("node01 mix\nnode02 drng\n")
    found(reach)
    sinfo(NoAnswer("Connection refused"))
    found(reach)
    assert [reach.is_good(node) for node in NODES] == [True, False]


@pytest.mark.parametrize("error", [NoAnswer("Connection refused"), UserError("sinfo refused: not now")])
def test_a_controller_that_is_away_is_asked_again(sinfo, error):
    reach = NodeStatePoller(Controller(), every_seconds=0.02)
    sinfo(error)
    assert found(reach) == []
    sinfo("node01 mix*\nnode02 mix\n")
    assert found(reach) == ["node01"]


def test_the_watch_never_waits_for_an_answer(sinfo):
    reach, answered = NodeStatePoller(Controller(), every_seconds=0.02), threading.Event()
    sinfo(lambda: answered.wait(30) and "node01 mix\nnode02 mix*\n")
    began = time.monotonic()
    assert reach.newly_unresponsive(NODES) == []
    assert reach.newly_unresponsive(NODES) == []
    assert time.monotonic() - began < LONGEST_CALL_SECONDS
    answered.set()
    assert found(reach) == ["node02"]
