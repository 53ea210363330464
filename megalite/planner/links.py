"""What a rank's messages travel over, by the axis of the mesh that they are for."""

from __future__ import annotations

from megalite.config.plan import RunPlan
from megalite.planner.machines import Machine


def rate_over(plan: RunPlan, machine: Machine, axis: str) -> float:
    """Bytes a second that a rank sends to the others of an axis: as within a node where all of them are in one. Ranks
    of tp are neighbours, then come cp, dp and pp.

    A sum or a gather over several nodes goes round in as many rings as the axis has ranks in a node, each with an
    adapter of its own, so that every byte crosses with them all; messages to one other rank have the rank's own.
    Groups that do not divide a node are in two.
    """
    stage = plan.tp * plan.num_replicas
    inner = {"tp": plan.tp, "cp": plan.tp * plan.cp, "ep": plan.tp * max(plan.cp, plan.ep), "dp": stage}
    reach = inner.get(axis, plan.world_size)
    bandwidth = machine.link
    if reach > machine.ranks_per_node or (plan.world_size > machine.ranks_per_node and machine.ranks_per_node % reach):
        sizes = {"tp": plan.tp, "cp": plan.cp, "dp": plan.num_replicas}
        stride = 1 if axis == "tp" else plan.tp
        rings = max(1, min(sizes.get(axis, 1), machine.ranks_per_node // stride))
        bandwidth = min(machine.link, rings * machine.network)
    return bandwidth * machine.constants.links


def leaves_node(plan: RunPlan, machine: Machine, num_replicas: int) -> bool:
    """Whether so many neighbouring replicas are in more nodes than one."""
    return plan.tp * num_replicas > machine.ranks_per_node
