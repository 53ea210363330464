"""Which nodes of a job run the next attempt: those whose agents are there, that are healthy and did not fail before.

    the job's nodes -> an agent gives signs of life -> not cut off -> Slurm finds nothing wrong with it
                    -> did not fail in this job, where there are enough others -> passes the check -> in order

All of it is in files and in Slurm's last answer: the controller may be away.

Slurm hands out nodes by name. Ranks that talk much should share a switch: nodes are sorted by their path through the
network (SLURM_TOPOLOGY_ADDR of a task on each), then by name. What is left over are spares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megalite.config.schema import Config
from megalite.errors import UserError
from megalite.slurm.agents import FRESH_SECONDS, Agents
from megalite.slurm.cluster import ClusterConfig
from megalite.slurm.controller import NodeStatePoller
from megalite.slurm.folder import LaunchFolder
from megalite.slurm.health_check import check_nodes
from megalite.slurm.network_partition import find_partition


@dataclass(frozen=True)
class NodeAssignment:
    """The nodes of one attempt."""

    used: tuple[str, ...]
    """In the order of their ranks."""
    spares: tuple[str, ...]


def assign_nodes(good: Sequence[str], addresses: Mapping[str, str], num_nodes: int) -> NodeAssignment:
    """Take the first nodes in the order of switches.

    Args:
        good: nodes that may be used.
        addresses: path of each through the switches, as in `spine.leaf1.node01`; where there is none, the name counts.
        num_nodes: nodes that ranks need.

    Raises:
        UserError: there are not enough.
    """
    in_order = sorted(good, key=lambda node: _natural(addresses.get(node) or node))
    if len(in_order) < num_nodes:
        raise UserError(
            f"{num_nodes} nodes are needed and {len(in_order)} of this job are good ({', '.join(in_order) or 'none'}); "
            "more `spares` in the cluster profile would help"
        )
    return NodeAssignment(tuple(in_order[:num_nodes]), tuple(in_order[num_nodes:]))


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that puts node9 before node10."""
    parts, digits = [], ""
    for char in name + "\0":
        if char.isdigit():
            digits += char
            continue
        if digits:
            parts.append((int(digits), ""))
            digits = ""
        parts.append((-1, char))
    return parts


class RefusedByNodes(UserError):
    """All nodes say that the config cannot run on them: other nodes would say the same."""


class NodeSelector:
    """Chooses nodes for one job.

    Args:
        folder: of the run.
        config: of the run.
        cluster: its profile.
        job: number of the batch job.
        agents: of its nodes.
        node_states: what Slurm thinks of them.
        num_nodes: that ranks need.
        tell: is told of what was found, as an event and its details.
    """

    def __init__(
        self,
        folder: LaunchFolder,
        config: Config,
        cluster: ClusterConfig,
        job: str,
        *,
        agents: Agents,
        node_states: NodeStatePoller,
        num_nodes: int,
        tell: Callable[..., None],
    ):
        self._folder, self._config, self._cluster, self._job = folder, config, cluster, job
        self._agents, self._node_states, self._num_nodes, self._tell = agents, node_states, num_nodes, tell
        self._num_checks = 0
        self.bad: dict[str, str] = {}
        """Nodes that failed in this job, and why."""

    def gather(self, goes_on: Callable[[], bool]) -> list[str]:
        """The nodes whose agents are there; they are waited for as long as `goes_on` says."""
        return self._agents.gather(self._num_nodes, goes_on=goes_on)

    def select(self, nodes: list[str], goes_on: Callable[[], bool]) -> NodeAssignment:
        """Nodes for the next attempt, in the order of switches.

        Args:
            nodes: whose agents are there.
            goes_on: whether to go on waiting for their checks.

        Raises:
            RefusedByNodes: no node can run the config.
            UserError: too few are left.
        """
        partition = find_partition(self._agents.reports, self._agents.channel.clock(), limit=FRESH_SECONDS)
        nodes = [node for node in nodes if partition is None or node not in partition.nodes]
        for is_better in (self._node_states.is_good, lambda node: node not in self.bad):
            better = [node for node in nodes if is_better(node)]
            nodes = better if len(better) >= self._num_nodes else nodes  # else those that failed get another chance
        if self._config.slurm.check_nodes and len(nodes) >= self._num_nodes:
            nodes = self._healthy(nodes, goes_on)
        addresses = {node: self._agents.channel.report(node).address for node in nodes}
        return assign_nodes(nodes, addresses, self._num_nodes)

    def _healthy(self, nodes: list[str], goes_on: Callable[[], bool]) -> list[str]:
        """Those that pass the check."""
        self._num_checks += 1
        result = check_nodes(
            self._agents,
            self._folder.run_dir,
            self._folder.path / "nodes" / self._job,
            nodes,
            gpus_per_node=self._cluster.gpus_per_node if self._config.train.device != "cpu" else 0,
            container=self._cluster.container,
            seed=int(self._job) + self._num_checks,
            goes_on=goes_on,
        )
        if result.refusal:
            raise RefusedByNodes(f"{', '.join(nodes)}: {result.refusal}")
        for node, why in result.unhealthy.items():
            self._tell("unfit", node=node, why=why)
        for pair, why in result.slow_pairs.items():
            self._tell("slow_link", nodes=list(pair), why=why)
        self.bad |= result.unhealthy
        return [node for node in nodes if node not in result.unhealthy]
