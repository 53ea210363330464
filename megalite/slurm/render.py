"""The batch script of a job: options for sbatch, and one line that becomes the supervisor.

Whatever decides anything is Python: `exec` puts the supervisor in the place of the shell, so that Slurm's signals,
which go to the batch shell, reach it.
"""

from __future__ import annotations

import hashlib
import shlex
import sys
from pathlib import Path

from megalite.slurm.cluster import ClusterConfig
from megalite.slurm.folder import LaunchFolder
from megalite.slurm.placement import Placement


def job_name(run_dir: Path) -> str:
    """Name of a run's jobs, equal for all of its chain and for no other run: dependency=singleton goes by it."""
    path = str(run_dir.absolute())
    return f"megalite-{run_dir.name}-{hashlib.sha256(path.encode()).hexdigest()[:8]}"


def render(run_dir: Path, cluster: ClusterConfig, placement: Placement) -> str:
    """The batch script.

    Args:
        run_dir: of the run; its launch folder is complete.
        cluster: where it will run.
        placement: of its ranks.
    """
    folder = LaunchFolder(run_dir.absolute())
    lines = ["#!/bin/bash", f"# {placement.mesh.world_size} ranks of {run_dir}, by `megalite launch`"]
    lines += [f"#SBATCH {option}" for option in sbatch_options(folder, cluster, placement)]
    lines += environment_lines(cluster)
    command = [sys.executable, "-m", "megalite.slurm.supervise", str(folder.run_dir)]
    return "\n".join([*lines, f"exec {shlex.join(command)}", ""])


def environment_lines(cluster: ClusterConfig) -> list[str]:
    """Shell lines that make a node ready for megalite."""
    return [*cluster.setup, *(f"export {name}={shlex.quote(value)}" for name, value in cluster.environment.items())]


def sbatch_options(folder: LaunchFolder, cluster: ClusterConfig, placement: Placement) -> list[str]:
    """Options of sbatch, one a line."""
    gpus = min(cluster.gpus_per_node, placement.ranks_per_node)
    given = {
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "constraint": cluster.constraint,
        "gpus-per-node": gpus or None,
        "cpus-per-task": cluster.cpus_per_rank,
    }
    return [
        f"--job-name={job_name(folder.run_dir)}",
        f"--nodes={placement.num_nodes + cluster.spares}",
        f"--ntasks-per-node={placement.ranks_per_node}",
        *(f"--{name}={value}" for name, value in given.items() if value is not None),
        f"--time={cluster.time_limit}",
        f"--signal=B:USR1@{cluster.save_seconds}",  # to the supervisor alone
        "--no-kill",  # a lost node is ours to replace
        "--no-requeue",  # the next job of the chain is in the queue already, and starts without Slurm's two minutes
        "--dependency=singleton",
        "--kill-on-invalid-dep=yes",
        "--open-mode=append",
        f"--output={folder.jobs}/%j.log",
        *cluster.sbatch,
    ]
