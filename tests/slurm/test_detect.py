"""A cluster profile from what Slurm says of itself, and one that asks for what is not there."""

from __future__ import annotations

import pytest

from megalite.errors import UserError
from megalite.slurm.cluster import ClusterConfig
from megalite.slurm.detect import misfits, profile_from

SINFO = [
    "cpu*|up|infinite|64|(null)|10",
    "gpu|up|2-00:00:00|96|gpu:h100:8(S:0-1)|40",
    "gpu|up|2-00:00:00|48|gpu:4|2",
    "old|down|1:00:00|8|gpu:2|3",
]


def test_a_profile_from_sinfo():
    """The default partition or the one asked for; the most frequent kind of node; GPUs in all of sinfo's spellings."""
    found = profile_from(SINFO, None)
    assert (found.partition, found.gpus_per_node, found.time_limit) == ("cpu", 0, "24:00:00")
    found = profile_from(SINFO, "gpu")
    assert (found.gpus_per_node, found.cpus_per_rank, found.time_limit) == (8, 12, "2-00:00:00")
    with pytest.raises(UserError, match=r"no partition 'old' that is up; there are cpu, gpu, old"):
        profile_from(SINFO, "old")


@pytest.mark.parametrize(
    ("settings", "num_nodes", "sentences"),
    [
        ({"partition": "gpu", "gpus_per_node": 8, "time_limit": "2-0"}, 42, []),
        ({"gpus_per_node": 0}, 10, []),
        ({"partition": "gpus"}, 1, ["partition: sinfo shows no gpus; there are cpu, gpu, old"]),
        ({"partition": "old"}, 1, ["partition: old is not up; there are cpu, gpu, old"]),
        (
            {"partition": "gpu", "gpus_per_node": 16, "time_limit": "3-0"},
            43,
            [
                "gpus_per_node: found 16, and nodes of gpu have at most 8; set it to 8",
                "43 nodes are needed, spares included, and gpu has 42; use a smaller dp, or fewer spares",
                "time_limit: found 3-0, and gpu allows 2-00:00:00; set it to that",
            ],
        ),
    ],
)
def test_what_a_cluster_does_not_have(settings, num_nodes, sentences):
    """All of it at once, with what to do."""
    assert misfits(SINFO, ClusterConfig(**settings), num_nodes) == sentences
