"""Which nodes of a job are cut off from the others, told from what each has heard of its neighbours.

Nodes that hear each other belong together. When a job falls into several such parts, the part that goes on is the one
that reaches Slurm's controller, or has a signal on its cables where the other has none, or is larger; what none of
these can tell is said to be undecided, and nobody is blamed. Pure arithmetic on reports: the side that complains first
is not always the one that is well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megalite.slurm.control_channel import AgentReport

NUM_NAMED = 4


@dataclass(frozen=True)
class NetworkPartition:
    """A job that has fallen apart."""

    nodes: tuple[str, ...]
    """Those that are cut off; empty where it cannot be told which side is."""
    why: str


def find_partition(reports: Mapping[str, AgentReport], now: float, *, limit: float) -> NetworkPartition | None:
    """Which nodes are cut off; None while all that ever heard each other still do.

    Args:
        reports: the last one of each node.
        now: by the clock of reports.
        limit: seconds of silence that count.
    """
    parts = _parts(reports, now, limit)
    if len(parts) < 2:
        return None
    sides = sorted(parts, key=lambda part: _claim(part, reports, now, limit), reverse=True)
    best, second = (_claim(part, reports, now, limit) for part in sides[:2])
    if best == second:
        names = " and ".join(_names(part) for part in sides[:2])
        return NetworkPartition((), f"{names} do not hear each other, and nothing tells which side is cut off")
    cut_off = tuple(node for part in sides[1:] for node in part)
    return NetworkPartition(
        cut_off, f"{_names(cut_off)} {_verb(cut_off)} cut off: {_reason(cut_off, sides[0], reports, limit)}"
    )


def _parts(reports: Mapping[str, AgentReport], now: float, limit: float) -> list[tuple[str, ...]]:
    """Groups of nodes that hear each other, of those that ever heard anyone or were heard."""
    ever = {frozenset((node, other)) for node, report in reports.items() for other in report.heard if other in reports}
    hears = {pair for pair in ever if any(_hears(reports, node, pair, now, limit) for node in pair)}
    left = [node for node in reports if any(node in pair for pair in ever)]
    parts = []
    while left:
        part, fringe = {left[0]}, [left[0]]
        while fringe:
            node = fringe.pop()
            found = {other for pair in hears if node in pair for other in pair} - part
            part |= found
            fringe += found
        parts.append(tuple(node for node in left if node in part))
        left = [node for node in left if node not in part]
    return parts


def _hears(reports: Mapping[str, AgentReport], node: str, pair: frozenset[str], now: float, limit: float) -> bool:
    (other,) = pair - {node}
    report = reports[node]
    silence = report.heard.get(other)
    return silence is not None and silence + (now - report.time) <= limit


def _claim(
    part: Sequence[str], reports: Mapping[str, AgentReport], now: float, limit: float
) -> tuple[bool, bool, bool, int]:
    """What speaks for a part, the strongest first."""
    fresh = [reports[node] for node in part if now - reports[node].time <= limit]
    sees_controller = any(report.sees_controller for report in fresh)
    has_carrier = not any(report.has_carrier is False for report in fresh)
    return bool(fresh), sees_controller, has_carrier, len(part)


def _reason(cut_off: Sequence[str], others: Sequence[str], reports: Mapping[str, AgentReport], limit: float) -> str:
    if all(reports[node].has_carrier is False for node in cut_off):
        return f"no signal on the cable, and {_names(others)} {_verb(others)} well"
    return f"not heard by {_names(others)} for {limit:.0f} s"


def _names(nodes: Sequence[str]) -> str:
    return ", ".join(nodes[:NUM_NAMED]) + (f" and {len(nodes) - NUM_NAMED} more" if len(nodes) > NUM_NAMED else "")


def _verb(nodes: Sequence[str]) -> str:
    return "is" if len(nodes) == 1 else "are"
