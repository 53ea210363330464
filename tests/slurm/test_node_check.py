"""Which nodes and links fall behind, and are named with their figures."""

from __future__ import annotations

import pytest

from megalite.slurm.link_check import find_slow_links, rounds
from megalite.slurm.node_check import NodeReport, examine_node, find_unhealthy


def report(node: str, **changes) -> NodeReport:
    values = {
        "num_gpus": 8,
        "memory_gb": 80.0,
        "gflops": 700.0,
        "disk_mb_per_second": 900.0,
        "clock_error_seconds": 0.1,
    }
    return NodeReport(node=node, **{**values, **changes})


def test_nodes_that_fall_behind_are_named():
    """With their figures and the others'."""
    reports = {f"n{number}": report(f"n{number}") for number in range(4)}
    assert find_unhealthy(reports, 8) == {}
    reports |= {
        "slow": report("slow", gflops=200.0),
        "few": report("few", num_gpus=7),
        "disk": report("disk", disk_mb_per_second=50.0),
        "clock": report("clock", clock_error_seconds=-90.0),
        "device": report("device", refusal="train.device=cuda, but torch finds no CUDA device here"),
        "silent": None,
    }
    assert find_unhealthy(reports, 8) == {
        "slow": "200 GFLOP/s, the median node has 700",
        "few": "7 GPUs answer, 8 are needed",
        "disk": "writes 50 MB/s, the median node 900",
        "clock": "its clock is -90 s off",
        "device": "train.device=cuda, but torch finds no CUDA device here",
        "silent": "did not answer",
    }
    assert find_unhealthy({"n1": None}, 0) == {"n1": "did not answer"}


def test_this_machine_is_examined(tmp_path):
    """Every figure is one; nothing is left in the folder."""
    found = examine_node(tmp_path)
    assert found.gflops > 0
    assert found.memory_gb > 0
    assert found.disk_mb_per_second > 0
    assert abs(found.clock_error_seconds) < 5
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("num_nodes", range(1, 10))
def test_every_node_meets_two_others(num_nodes):
    """Each round is made of pairs with no node in common, and all rounds together close a ring."""
    nodes = [f"n{number}" for number in range(num_nodes)]
    found = rounds(nodes)
    for pairs in found:
        assert len({node for pair in pairs for node in pair}) == 2 * len(pairs)
    met = [pair for pairs in found for pair in pairs]
    assert len(found) <= 3
    assert len(set(met)) == len(met) == {1: 0, 2: 1}.get(num_nodes, num_nodes)
    assert all(sum(node in pair for pair in met) == min(2, num_nodes - 1) for node in nodes)


def ring(num_nodes: int, **slow: float) -> dict[tuple[str, str], float]:
    """1,000 MB/s for all pairs of a ring, but for those named like n1_n2."""
    pairs = [pair for group in rounds([f"n{number}" for number in range(num_nodes)]) for pair in group]
    return {pair: slow.get("_".join(pair), 1000.0 + place) for place, pair in enumerate(pairs)}


@pytest.mark.parametrize("num_nodes", [3, 4, 5, 8])
def test_a_node_that_is_slow_with_all_is_left_out(num_nodes):
    """Also where that makes most pairs of a small job slow."""
    nodes, pairs = find_slow_links(ring(num_nodes, n0_n1=20.0, n1_n2=30.0))
    assert list(nodes) == ["n1"]
    assert nodes["n1"].startswith("30 MB/s at best with its neighbours, others have 1,0")
    assert pairs == {}


def test_a_slow_way_between_good_nodes_is_named():
    """No node is left out for it; two nodes alone have no one to be compared with."""
    nodes, pairs = find_slow_links(ring(4, n1_n2=100.0))
    assert nodes == {}
    assert pairs == {("n1", "n2"): "100 MB/s, others have 1,003"}
    assert find_slow_links(ring(2, n0_n1=1.0)) == ({}, {})
    assert find_slow_links({}) == ({}, {})
