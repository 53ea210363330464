"""Who is cut off, told from what nodes heard of each other."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from megalite.slurm.control_channel import AgentReport
from megalite.slurm.network_partition import find_partition
from megalite.slurm.peers import PeerMonitor, ring_peers

NOW, LIMIT = 1000.0, 8.0


def reports(groups: Sequence[Sequence[str]], **changes: dict) -> dict[str, AgentReport]:
    """Of nodes that heard each other in groups until now, and all of each other until a while ago."""
    nodes = [node for group in groups for node in group]
    found = {}
    for group in groups:
        for node in group:
            heard = {other: 0.5 if other in group else 20.0 for other in ring_peers(sorted(nodes), node)}
            found[node] = AgentReport(**{"time": NOW - 0.5, "heard": heard, **changes.get(node, {})})
    return found


def test_whom_a_node_asks():
    """Two before and two after it on a ring, each once."""
    nodes = [f"n{number}" for number in range(6)]
    assert ring_peers(nodes, "n0") == ["n1", "n5", "n2", "n4"]
    assert ring_peers(nodes[:3], "n1") == ["n2", "n0"]
    assert ring_peers(nodes[:2], "n1") == ["n0"]
    assert ring_peers(nodes[:1], "n0") == []
    assert ring_peers(nodes, "stranger") == []


def test_all_hear_each_other():
    """Also along a chain, and where nobody ever heard anyone: their datagrams do not get through."""
    assert find_partition(reports([["a", "b", "c"]]), NOW, limit=LIMIT) is None
    chain = {
        "a": AgentReport(NOW, heard={"b": 1.0, "c": 50.0}),
        "b": AgentReport(NOW),
        "c": AgentReport(NOW, heard={"b": 1.0}),
    }
    assert find_partition(chain, NOW, limit=LIMIT) is None
    assert find_partition({"a": AgentReport(NOW), "b": AgentReport(NOW)}, NOW, limit=LIMIT) is None


@pytest.mark.parametrize(
    ("groups", "changes", "expected", "words"),
    [
        ([["a"], ["b", "c", "d"]], {}, ("a",), "a is cut off: not heard by b, c, d for 8 s"),
        ([["a", "b"], ["c"]], {}, ("c",), "not heard by a, b"),
        ([["a"], ["b"], ["c", "d", "e"]], {}, ("a", "b"), "a, b are cut off"),
        ([["a"], ["b"]], {"a": {"has_carrier": False}, "b": {"has_carrier": True}}, ("a",), "no signal on the cable"),
        ([["a"], ["b"]], {"b": {"has_carrier": False}, "a": {"has_carrier": True}}, ("b",), "b is cut off"),
        ([["a"], ["b"]], {"a": {"sees_controller": False}, "b": {"sees_controller": True}}, ("a",), "not heard by b"),
        ([["a"], ["b"]], {"b": {"time": NOW - 20}}, ("b",), "b is cut off"),
        ([["a", "b"], ["c", "d", "e"]], {"a": {"sees_controller": True}}, ("c", "d", "e"), "not heard by a, b"),
        ([["a"], ["b"]], {}, (), "a and b do not hear each other, and nothing tells which side is cut off"),
    ],
)
def test_the_side_that_is_cut_off_is_named(groups, changes, expected, words):
    """The smaller one, or the one that the controller and the cables speak against; where nothing speaks, nobody."""
    found = find_partition(reports(groups, **changes), NOW, limit=LIMIT)
    assert sorted(found.nodes) == sorted(expected)
    assert words in found.why


def test_silence_counts_from_the_report():
    """A report that is old makes what it heard older: a node without power was heard by itself only."""
    last_words = {"time": NOW - 20, "heard": {"a": 0.5, "b": 0.5}}
    found = reports([["a", "b"], ["c"]], c=last_words)
    assert find_partition(found, NOW, limit=21.0) is None
    assert find_partition(found, NOW, limit=LIMIT).nodes == ("c",)


def test_neighbours_on_one_machine():
    """Three agents' ears and voices on the loopback: they hear each other, a stranger without the secret gets no
    answer, and the silence of one that ends grows."""
    found: dict[str, PeerMonitor] = {}
    names = ["a", "b", "c"]

    def end_of(name: str) -> tuple[str, int] | None:
        return found[name].endpoint if name in found else None

    for name in names:
        found[name] = PeerMonitor(names, name, "127.0.0.1", "secret", end_of)
    stranger = PeerMonitor(["a", "x"], "x", "127.0.0.1", "another secret", end_of)
    try:
        deadline = time.monotonic() + 20
        while any(len(found[name].heard()) < 2 for name in names):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert stranger.heard() == {}
        assert all(found[name].has_carrier for name in names)
        assert found["a"].endpoint[0] == "127.0.0.1"
        assert found["a"].sees_controller is None
        found["c"].close()
        while found["a"].heard()["c"] < 2.5:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert found["a"].heard()["b"] < 2.5
    finally:
        for each in (*found.values(), stranger):
            each.close()
