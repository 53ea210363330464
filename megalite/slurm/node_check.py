"""Is this node healthy enough to train? A minute at most before each attempt, one task a node.

    python -m megalite.slurm.node_check RUN FOLDER SEED NODE=ADDRESS...      leaves FOLDER/NODE.json and .links

A node first measures itself and says so, then the links to two others (`link_check.py`), which may be slow to answer.

Whether the config can run on the node's device is asked here too: a login node cannot tell.

New hardware fails early, and one slow node slows all: each is measured on what training needs (matrix products, memory,
the run's disk, the clock), and `find_unhealthy` names the ones that fall behind the others, with the figures.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megalite.config.load import load_config
from megalite.errors import UserError
from megalite.files import write_atomically
from megalite.slurm.folder import LaunchFolder
from megalite.slurm.link_check import measure_links
from megalite.train.in_place import clock_of
from megalite.train.place import TOKEN_VARIABLE
from megalite.train.preflight import check_device

LINKS = ".links"

PARTIAL_FILES = ".speed-*"
"""Left by a check that was killed while it wrote."""

MATMUL_SIZE = {"cpu": 768, "cuda": 8192}
MATMUL_ROUNDS = 8
DISK_BYTES = 16 * 2**20

SLOWEST_SHARE = 0.5
"""Of the median node's speed. Shared machines vary by a third; a broken one loses more than half."""

LARGEST_CLOCK_ERROR_SECONDS = 30.0


@dataclass(frozen=True)
class NodeReport:
    """What was measured on a node."""

    node: str
    num_gpus: int
    memory_gb: float
    """Free now: of the GPU with least where there are GPUs, else of the node."""
    gflops: float
    """Of fp32 products on a CPU, bf16 on a GPU; the slowest GPU's."""
    disk_mb_per_second: float
    """Writing to the run's folder, synced."""
    clock_error_seconds: float
    """Against the file server's."""
    refusal: str = ""
    """Why the config cannot run on this node's device."""


def examine_node(folder: Path, refusal: str = "") -> NodeReport:
    """Measure this node."""
    gpus = _examine_gpus()
    return NodeReport(
        node=os.environ.get("SLURMD_NODENAME", socket.gethostname()),
        num_gpus=len(gpus),
        memory_gb=min((memory for memory, _ in gpus), default=_free_memory_gb()),
        gflops=min((gflops for _, gflops in gpus), default=0.0) or _cpu_gflops(),
        disk_mb_per_second=_disk_speed(folder),
        clock_error_seconds=round(time.time() - clock_of(folder), 3),
        refusal=refusal,
    )


def find_unhealthy(reports: Mapping[str, NodeReport | None], gpus_per_node: int) -> dict[str, str]:
    """The nodes that should not train, and why.

    Args:
        reports: by node; None for one that did not answer.
        gpus_per_node: GPUs that ranks need on a node.
    """
    answered = [report for report in reports.values() if report is not None]
    if not answered:
        return dict.fromkeys(reports, "did not answer")
    speed = statistics.median(report.gflops for report in answered)
    disk = statistics.median(report.disk_mb_per_second for report in answered)
    problems = {}
    for node, report in reports.items():
        if report is None:
            problems[node] = "did not answer"
        elif report.refusal:
            problems[node] = report.refusal
        elif report.num_gpus < gpus_per_node:
            problems[node] = f"{report.num_gpus} GPUs answer, {gpus_per_node} are needed"
        elif report.gflops < SLOWEST_SHARE * speed:
            problems[node] = f"{report.gflops:,.0f} GFLOP/s, the median node has {speed:,.0f}"
        elif report.disk_mb_per_second < SLOWEST_SHARE / 5 * disk:
            problems[node] = f"writes {report.disk_mb_per_second:,.0f} MB/s, the median node {disk:,.0f}"
        elif abs(report.clock_error_seconds) > LARGEST_CLOCK_ERROR_SECONDS:
            problems[node] = f"its clock is {report.clock_error_seconds:+.0f} s off"
    return problems


def read_reports(folder: Path, nodes: Sequence[str]) -> dict[str, NodeReport | None]:
    """What nodes have left in a folder."""
    reports: dict[str, NodeReport | None] = dict.fromkeys(nodes)
    for node in nodes:
        path = folder / f"{node}.json"
        if path.is_file():
            reports[node] = NodeReport(**json.loads(path.read_text(encoding="utf-8")))
    return reports


def _examine_gpus() -> list[tuple[float, float]]:
    """Free memory in GB and GFLOP/s of each GPU that can be used here."""
    if not os.environ.get("CUDA_VISIBLE_DEVICES"):
        return []
    import torch

    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        with torch.cuda.device(index):
            free, _ = torch.cuda.mem_get_info()
            size = MATMUL_SIZE["cuda"]
            a = torch.randn(size, size, dtype=torch.bfloat16, device="cuda")
            for rounds in (1, MATMUL_ROUNDS):  # the first warms up
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(rounds):
                    a @ a
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            found.append((round(free / 1e9, 1), round(2 * size**3 * MATMUL_ROUNDS / seconds / 1e9, 1)))
    return found


def _cpu_gflops() -> float:
    import numpy as np

    size = MATMUL_SIZE["cpu"]
    a = np.ones((size, size), np.float32)
    seconds = []
    for _ in range(MATMUL_ROUNDS):
        start = time.perf_counter()
        a @ a
        seconds.append(time.perf_counter() - start)
    return round(2 * size**3 / min(seconds) / 1e9, 1)  # the best: what else runs here is not the node's fault


def _free_memory_gb() -> float:
    with open("/proc/meminfo", encoding="ascii") as file:
        values = dict(line.split(":") for line in file)
    return round(int(values["MemAvailable"].split()[0]) / 1e6, 1)


def _disk_speed(folder: Path) -> float:
    path = folder / PARTIAL_FILES.replace("*", f"{socket.gethostname()}-{os.getpid()}")
    start = time.perf_counter()
    try:
        with open(path, "wb") as file:
            file.write(os.urandom(DISK_BYTES))
            file.flush()
            os.fsync(file.fileno())
    finally:
        path.unlink(missing_ok=True)
    return round(DISK_BYTES / 1e6 / (time.perf_counter() - start), 1)


def _refusal(run_dir: Path) -> str:
    """Why the run's config cannot run here; empty when it can."""
    try:
        check_device(load_config(LaunchFolder(run_dir).config))
    except UserError as error:
        return str(error)
    return ""


def main() -> None:
    """Measure this node and its links, and leave the reports."""
    run_dir, folder, seed = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    addresses = dict(node.partition("=")[::2] for node in sys.argv[4:])
    report = examine_node(folder, _refusal(run_dir))
    write_atomically(folder / f"{report.node}.json", json.dumps(asdict(report)))
    if len(addresses) > 1:
        backend, token = "nccl" if report.num_gpus else "gloo", os.environ.get(TOKEN_VARIABLE, "")
        speeds = measure_links(addresses, report.node, backend, seed=seed, token=token)
        write_atomically(folder / f"{report.node}{LINKS}", json.dumps(speeds))


if __name__ == "__main__":
    main()
