"""The check of a job's nodes before an attempt: one srun step (`node_check.py`, `link_check.py`), then a verdict."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megalite.slurm.controller import Controller
from megalite.slurm.link_check import Pair, blame
from megalite.slurm.node_check import LINKS, read_reports, unfit

STEP_NAME = "node-check"

LONGEST_SECONDS = 120.0


@dataclass(frozen=True)
class Verdict:
    """What the check of some nodes has found."""

    unfit: dict[str, str]
    """Nodes that should not train, and why."""
    slow_pairs: dict[Pair, str]
    """Pairs of nodes that are slow with each other and not with others; no node is left out for that."""
    addresses: dict[str, str]
    """Each node's path through the switches."""


def check_nodes(folder: Path, nodes: Sequence[str], gpus_per_node: int, controller: Controller, job: str) -> Verdict:
    """Let each node measure itself and its links.

    Args:
        folder: for the reports; former ones go.
        nodes: of the job.
        gpus_per_node: that ranks need.
        controller: the cluster's controller.
        job: number of the batch job.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.json"):
        path.unlink()
    command = [
        *("srun", f"--job-name={STEP_NAME}", f"--nodelist={','.join(nodes)}", f"--nodes={len(nodes)}"),
        *(f"--ntasks={len(nodes)}", "--ntasks-per-node=1", "--overlap", "--export=ALL"),
        *(sys.executable, "-m", "megalite.slurm.node_check", str(folder), job, *nodes),
    ]
    with open(folder / "srun.log", "ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            process.wait(LONGEST_SECONDS)
        except subprocess.TimeoutExpired:
            step = controller.step_of(job, STEP_NAME)
            controller.cancel(*([step] if step else []))
            process.kill()
            process.wait()
    reports = read_reports(folder, nodes)
    slow, pairs = blame(_read_links(folder, nodes))
    return Verdict(
        {**slow, **unfit(reports, gpus_per_node)},
        pairs,
        {node: report.address for node, report in reports.items() if report is not None},
    )


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
