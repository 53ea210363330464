"""Nodes that Slurm does not reach are told once each, and nobody waits for Slurm's answer."""

from __future__ import annotations

import threading

from megalite.slurm.unreached import UnreachedNodes
from tests.kit.slurm import until

NODES = ("node01", "node02", "node03")


class Slurm:
    """Answers when it is let."""

    def __init__(self) -> None:
        self.unreached: list[str] = []
        self.may_answer = threading.Event()
        self.num_answers = 0

    def unreached_nodes(self, nodes: tuple[str, ...]) -> list[str]:
        self.may_answer.wait()
        self.num_answers += 1
        return list(self.unreached)


def test_each_is_told_once():
    """Also when it comes back and goes again; nodes of others do not count, and a slow answer holds up nobody."""
    slurm, clock = Slurm(), [0.0]
    nodes = UnreachedNodes(slurm, every_seconds=10, now=lambda: clock[0])

    def ask() -> list[str]:
        """A question, and what the look after its answer tells."""
        clock[0] += 10
        number = slurm.num_answers
        assert nodes.look(NODES) == []
        slurm.may_answer.set()
        until(lambda: slurm.num_answers > number, "an answer")
        nodes._thread.join()
        slurm.may_answer.clear()
        return nodes.look(NODES)

    slurm.unreached = ["node02", "other"]
    assert nodes.look(NODES) == []
    assert nodes._thread is None  # it is not time yet
    clock[0] = 10
    assert nodes.look(NODES) == []
    clock[0] = 100
    assert nodes.look(NODES) == []  # the first question has no answer yet
    clock[0] = 0
    assert ask() == ["node02"]
    assert ask() == []
    slurm.unreached = ["node02", "node03"]
    assert ask() == ["node03"]
    slurm.unreached = ["node03"]
    assert ask() == []
    slurm.unreached = ["node03", "node02"]
    assert ask() == ["node02"]
