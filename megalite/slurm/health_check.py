"""The health check of a job's nodes before an attempt: work for agents (`node_check.py`, `link_check.py`), and what
came of it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megalite.slurm.agents import Agents, python_command
from megalite.slurm.cluster import ContainerConfig
from megalite.slurm.control_channel import Workload
from megalite.slurm.link_check import Pair, find_slow_links
from megalite.slurm.node_check import LINKS, PARTIAL_FILES, NodeReport, find_unhealthy, read_reports

LONGEST_SECONDS = 120.0

POLL_SECONDS = 0.2


@dataclass(frozen=True)
class HealthCheckResult:
    """What the check of some nodes has found."""

    unhealthy: dict[str, str]
    """Nodes that should not train, and why."""
    slow_pairs: dict[Pair, str]
    """Pairs of nodes that are slow with each other and not with others; no node is left out for that."""
    refusal: str = ""
    """What all nodes say against the config: no other node would help."""


def check_nodes(
    agents: Agents,
    run_dir: Path,
    folder: Path,
    nodes: Sequence[str],
    *,
    gpus_per_node: int,
    container: ContainerConfig | None,
    seed: int,
    goes_on: Callable[[], bool],
) -> HealthCheckResult:
    """Let each node measure itself and its links.

    Args:
        agents: of the job.
        run_dir: of the run, whose config says what nodes must have.
        folder: for the reports; former ones go.
        nodes: to be checked.
        gpus_per_node: that ranks need.
        container: in which ranks run.
        seed: of the ports.
        goes_on: whether to go on waiting.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in (*folder.glob("*.json"), *folder.glob(f"*{LINKS}"), *folder.glob(PARTIAL_FILES)):
        path.unlink(missing_ok=True)
    python = python_command(container, is_step=False)
    reports = agents.reports
    addresses = [f"{node}={endpoint[0]}" if (endpoint := reports[node].endpoint) else node for node in nodes]
    command = (*python, "-m", "megalite.slurm.node_check", str(run_dir), str(folder), str(seed), *addresses)
    agents.begin(Workload(command, tuple(nodes), 1, {}, str(folder)))
    deadline = time.monotonic() + LONGEST_SECONDS
    while time.monotonic() < deadline and goes_on() and not agents.is_done(nodes):
        time.sleep(POLL_SECONDS)
    agents.end(nodes)
    return _evaluate(folder, nodes, gpus_per_node)


def _evaluate(folder: Path, nodes: Sequence[str], gpus_per_node: int) -> HealthCheckResult:
    reports = read_reports(folder, nodes)
    slow, pairs = find_slow_links(_read_links(folder, nodes))
    unhealthy = {**slow, **find_unhealthy(reports, gpus_per_node)}
    return HealthCheckResult(unhealthy, pairs, _common_refusal(list(reports.values())))


def _common_refusal(reports: Sequence[NodeReport | None]) -> str:
    """What every node says, if all say the same."""
    said = {report.refusal if report is not None else "" for report in reports}
    return said.pop() if len(said) == 1 else ""


def _read_links(folder: Path, nodes: Sequence[str]) -> dict[Pair, float]:
    """MB/s of each pair that was measured, the slower of its two ends'."""
    speeds: dict[Pair, float] = {}
    for node in nodes:
        path = folder / f"{node}{LINKS}"
        measured = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        for partner, speed in measured.items():
            pair = (min(node, partner), max(node, partner))
            speeds[pair] = min(speed, speeds.get(pair, speed))
    return speeds
