"""Which nodes of a job run the next attempt: those whose agents are there, that are fit, and that did not fail before.

    the job's nodes -> an agent gives signs of life -> not cut off -> Slurm finds nothing wrong with it
                    -> did not fail in this job, where there are enough others -> passes the check -> in order

All of it is in files and in Slurm's last answer: the controller may be away.
"""

from __future__ import annotations

from collections.abc import Callable

from megalite.config.schema import Config
from megalite.errors import UserError
from megalite.slurm.agents import FRESH_SECONDS, Agents
from megalite.slurm.cluster import ClusterConfig
from megalite.slurm.cut_off import find_split
from megalite.slurm.fitness import check_nodes
from megalite.slurm.folder import LaunchFolder
from megalite.slurm.hosts import Hosts, choose
from megalite.slurm.reach import Reach


class RefusedByNodes(UserError):
    """All nodes say that the config cannot run on them: other nodes would say the same."""


class Choice:
    """Chooses nodes for one job.

    Args:
        folder: of the run.
        config: of the run.
        cluster: its profile.
        job: number of the batch job.
        agents: of its nodes.
        reach: what Slurm thinks of them.
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
        reach: Reach,
        num_nodes: int,
        tell: Callable[..., None],
    ):
        self._folder, self._config, self._cluster, self._job = folder, config, cluster, job
        self._agents, self._reach, self._num_nodes, self._tell = agents, reach, num_nodes, tell
        self._num_checks = 0
        self.bad: dict[str, str] = {}
        """Nodes that failed in this job, and why."""

    def gather(self, goes_on: Callable[[], bool]) -> list[str]:
        """The nodes whose agents are there; they are waited for as long as `goes_on` says."""
        return self._agents.gather(self._num_nodes, goes_on=goes_on)

    def hosts(self, nodes: list[str], goes_on: Callable[[], bool]) -> Hosts:
        """Nodes for the next attempt, in the order of switches.

        Args:
            nodes: whose agents are there.
            goes_on: whether to go on waiting for their checks.

        Raises:
            RefusedByNodes: no node can run the config.
            UserError: too few are left.
        """
        split = find_split(self._agents.reports, self._agents.desk.clock(), limit=FRESH_SECONDS)
        nodes = [node for node in nodes if split is None or node not in split.nodes]
        for is_better in (self._reach.is_good, lambda node: node not in self.bad):
            better = [node for node in nodes if is_better(node)]
            nodes = better if len(better) >= self._num_nodes else nodes  # else those that failed get another chance
        if self._config.slurm.check_nodes and len(nodes) >= self._num_nodes:
            nodes = self._fit(nodes, goes_on)
        addresses = {node: self._agents.desk.report(node).address for node in nodes}
        return choose(nodes, addresses, self._num_nodes)

    def _fit(self, nodes: list[str], goes_on: Callable[[], bool]) -> list[str]:
        """Those that pass the check."""
        self._num_checks += 1
        verdict = check_nodes(
            self._agents,
            self._folder.run_dir,
            self._folder.path / "nodes" / self._job,
            nodes,
            gpus_per_node=self._cluster.gpus_per_node if self._config.train.device != "cpu" else 0,
            container=self._cluster.container,
            seed=int(self._job) + self._num_checks,
            goes_on=goes_on,
        )
        if verdict.refusal:
            raise RefusedByNodes(f"{', '.join(nodes)}: {verdict.refusal}")
        for node, why in verdict.unfit.items():
            self._tell("unfit", node=node, why=why)
        for pair, why in verdict.slow_pairs.items():
            self._tell("slow link", nodes=list(pair), why=why)
        self.bad |= verdict.unfit
        return [node for node in nodes if node not in verdict.unfit]
