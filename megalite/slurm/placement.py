"""Which ranks run on which node: tp inside a node, then dp, pipeline stages across.

    pp 2 x dp 2 x tp 4, 8 ranks a node        node 0   stage 0   dp 0: 0 1 2 3   dp 1: 4 5 6 7
                                              node 1   stage 1   dp 0: 8 9 ...   dp 1: ...

Ranks are numbered tp fastest (`parallel.mesh`), and nodes take them in order, so that a tensor-parallel group, which
talks in every layer, is a run of neighbours. Nodes are put in the order of the network's switches when the job starts,
which keeps neighbouring stages and data-parallel groups near each other too. Pure arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.plan import default_world_size
from megalite.config.schema import Config
from megalite.config.validate import validate
from megalite.errors import ConfigError
from megalite.parallel.mesh import AXIS_NAMES, Mesh
from megalite.slurm.cluster import ClusterConfig

FARTHEST_DP = 4096
"""How far from the dp asked for a legal one is looked for."""


@dataclass(frozen=True)
class Placement:
    """The ranks of a run on equal nodes."""

    mesh: Mesh
    ranks_per_node: int

    @property
    def num_nodes(self) -> int:
        return self.mesh.world_size // self.ranks_per_node

    def ranks_of(self, node: int) -> range:
        """Global ranks on a node."""
        return range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)

    def spans(self, node: int) -> dict[str, tuple[int, int]]:
        """First and last place along each axis that a node's ranks have."""
        places = [self.mesh.coords(rank) for rank in self.ranks_of(node)]
        columns = {axis: [getattr(place, axis) for place in places] for axis in AXIS_NAMES}
        return {axis: (min(column), max(column)) for axis, column in columns.items()}


def place(config: Config, cluster: ClusterConfig, num_nodes: int | None = None) -> Placement:
    """Place a config's ranks on a cluster's nodes.

    Args:
        config: of the run.
        cluster: its nodes.
        num_nodes: nodes to fill; None takes as many as the layout needs with the dp that the config sets, or 1.

    Raises:
        ConfigError: the layout does not fill whole nodes, or cuts a tensor-parallel group; with the nearest legal ones.
    """
    per_node = cluster.num_ranks_per_node
    world_size = num_nodes * per_node if num_nodes is not None else default_world_size(config)
    parallel = config.parallel
    problems = []
    if num_nodes is None and world_size > per_node and world_size % per_node:
        problems.append(
            f"{world_size} ranks (pp {parallel.pp} x dp {parallel.dp or 1} x cp {parallel.cp} x tp {parallel.tp}) do "
            f"not fill whole nodes of {per_node}; {_nearest(config, per_node)}"
        )
    per_node = min(per_node, world_size)
    if not cluster.tp_across_nodes and per_node % parallel.tp:
        legal = [tp for tp in range(1, per_node + 1) if per_node % tp == 0]
        problems.append(
            f"parallel.tp: found {parallel.tp}, and a node runs {per_node} ranks, so tensor-parallel groups would span "
            f"nodes; use tp {_listed(legal)}, or allow it with tp_across_nodes: true in the cluster profile"
        )
    if problems:
        raise ConfigError(problems)
    validate(config, world_size)
    dp = world_size // (parallel.pp * parallel.cp * parallel.tp)
    return Placement(Mesh(parallel.pp, dp, parallel.cp, parallel.tp, parallel.ep), per_node)


def _nearest(config: Config, per_node: int) -> str:
    """The layouts nearest by dp that fill nodes and pass every check."""
    parallel = config.parallel
    asked, shard = parallel.dp or 1, parallel.pp * parallel.cp * parallel.tp
    legal = [
        dp
        for direction in (range(asked - 1, 0, -1), range(asked + 1, asked + FARTHEST_DP))
        if (dp := next((dp for dp in direction if dp * shard % per_node == 0 and _is_valid(config, dp)), None))
    ]
    if not legal:
        return "no dp does with this pp, tp and global batch; change those"
    layouts = [f"dp {dp} ({dp * shard} ranks on {dp * shard // per_node} nodes)" for dp in legal]
    return f"nearest: {' or '.join(layouts)}"


def _is_valid(config: Config, dp: int) -> bool:
    changed = config.model_copy(update={"parallel": config.parallel.model_copy(update={"dp": dp})})
    try:
        validate(changed, default_world_size(changed))
    except ConfigError:
        return False
    return True


def _listed(numbers: list[int]) -> str:
    names = [str(number) for number in numbers]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
