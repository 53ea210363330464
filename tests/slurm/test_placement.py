"""Where ranks go: nodes filled in order, tensor-parallel groups whole, and refusals that name a layout which fits."""

from __future__ import annotations

import pytest

from megalite.config.load import load_config
from megalite.config.schema import Config
from megalite.errors import ConfigError
from megalite.parallel.mesh import AXIS_NAMES, Mesh
from megalite.slurm.cluster import ClusterConfig, load_cluster, seconds_of
from megalite.slurm.launch import plan_launch
from megalite.slurm.node_selection import assign_nodes
from megalite.slurm.placement import Placement, place
from tests.kit.paths import ROOT

CLUSTER = ClusterConfig()


def config(**parallel) -> Config:
    """70B's shape under some layout."""
    overrides = [f"parallel.{name}={value}" for name, value in parallel.items()]
    return load_config(ROOT / "configs/llama-70b.yaml", overrides)


@pytest.mark.parametrize("ranks_per_node", [1, 2, 4, 8])
def test_every_rank_is_on_one_node(ranks_per_node):
    """And the spans of a node are those of its ranks, by the mesh's own arithmetic."""
    placement = Placement(Mesh(pp=2, dp=3, tp=4), ranks_per_node)
    found = [rank for node in range(placement.num_nodes) for rank in placement.ranks_of(node)]
    assert found == list(range(24))
    for node in range(placement.num_nodes):
        for axis, (first, last) in placement.spans(node).items():
            places = {placement.mesh.coords(rank)[AXIS_NAMES.index(axis)] for rank in placement.ranks_of(node)}
            assert (first, last) == (min(places), max(places))


def test_tensor_parallel_groups_stay_on_a_node():
    """512 ranks: each node has one group of eight."""
    placement = place(config(), CLUSTER, num_nodes=64)
    assert placement.mesh == Mesh(pp=4, dp=16, tp=8)
    for node in range(64):
        (group,) = {placement.mesh.ranks_of("tp", rank) for rank in placement.ranks_of(node)}
        assert group == tuple(placement.ranks_of(node))


def test_nodes_follow_the_layout():
    """Without a number of nodes: as many as pp x dp x tp need; a layout smaller than a node takes part of one."""
    assert place(config(dp=2), CLUSTER).num_nodes == 8
    small = place(config(pp=1, dp=1, tp=2, zero_stage=1), CLUSTER)
    assert (small.num_nodes, small.ranks_per_node) == (1, 2)


@pytest.mark.parametrize(
    ("parallel", "settings", "nodes", "sentence"),
    [
        ({"tp": 3}, {}, 64, "use tp 1, 2, 4 or 8, or allow it with tp_across_nodes: true"),
        ({"tp": 16}, {}, None, "found 16, and a node runs 8 ranks"),
        ({"tp": 2, "pp": 2, "dp": 3}, {}, None, r"nearest: dp 2 \(8 ranks on 1 nodes\)"),
        ({}, {"ranks_per_node": 4}, 2, "8 ranks are not a multiple of pp x cp x tp"),
    ],
)
def test_what_does_not_fit_is_refused(parallel, settings, nodes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        place(config(**parallel), ClusterConfig(tp_across_nodes=not parallel, **settings), nodes)


def test_the_nearest_layout_is_legal():
    """What a refusal names is accepted."""
    refused = config(tp=2, pp=2, dp=3)
    with pytest.raises(ConfigError, match=r"dp 2 .* or dp 4 "):
        place(refused, CLUSTER)
    for dp in (2, 4):
        assert place(config(tp=2, pp=2, dp=dp), CLUSTER).mesh.dp == dp


def test_a_limit_shorter_than_a_save_is_refused():
    with pytest.raises(ConfigError, match="time_limit: 3:00 is 180 s, and 150 s of it are for saving"):
        plan_launch(config(), ClusterConfig(time_limit="3:00", save_seconds=150), 64)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("12:00:00", 43200),
        ("7-0", 604800),
        ("7-12:30", 649800),
        ("7-12:30:15", 649815),
    ],
)
def test_time_limits(text, seconds):
    """In every form that sbatch takes."""
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("name", ["h100", "cpu"])
def test_ready_profiles(name):
    """Each is valid, and a job script can be made with it."""
    cluster = load_cluster(ROOT / f"configs/clusters/{name}.yaml")
    planned = plan_launch(config(tp=2, pp=4, dp=4), cluster)
    assert planned.placement.num_nodes == 32 // cluster.num_ranks_per_node


def test_a_profile_with_mistakes(tmp_path):
    """All of them, with their lines."""
    path = tmp_path / "c.yaml"
    path.write_text("partitoin: gpu\ntime_limit: soon\ncontainer: {runtime: docker}\n")
    with pytest.raises(ConfigError) as caught:
        load_cluster(path)
    text = str(caught.value)
    assert f"{path}:1: partitoin: unknown key (did you mean 'partition'?)" in text
    assert f"{path}:2: time_limit:" in text
    assert f"{path}:3: container.image" in text


def test_hosts_follow_switches():
    """Nodes of one switch stand together, node9 before node10; the last ones are spares."""
    addresses = {"n1": "s.leaf1.n1", "n2": "s.leaf2.n2", "n3": "s.leaf1.n3", "n10": "s.leaf1.n10"}
    hosts = assign_nodes(["n10", "n2", "n3", "n1"], addresses, 3)
    assert (hosts.used, hosts.spares) == (("n1", "n3", "n10"), ("n2",))
