"""Which nodes of an allocation run ranks, and in which order.

Slurm hands out nodes by name. Ranks that talk much should share a switch: nodes are sorted by their path through the
network (SLURM_TOPOLOGY_ADDR of a task on each), then by name. What is left over are spares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megalite.errors import UserError


@dataclass(frozen=True)
class Hosts:
    """The nodes of one attempt."""

    used: tuple[str, ...]
    """In the order of their ranks."""
    spares: tuple[str, ...]


def choose(good: Sequence[str], addresses: Mapping[str, str], num_nodes: int) -> Hosts:
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
    return Hosts(tuple(in_order[:num_nodes]), tuple(in_order[num_nodes:]))


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
