"""The batch script of a job: options for sbatch, and one line that becomes the supervisor.

Whatever decides anything is Python: `exec` puts the supervisor in the place of the shell, so that Slurm's signals,
which go to the batch shell, reach it. How strings get into it unharmed: `slurm_quoting.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from megalite import slurm_quoting
from megalite.slurm.cluster import ClusterConfig
from megalite.slurm.folder import LaunchFolder
from megalite.slurm.placement import Placement
from megalite.slurm_quoting import check_log_folder, command_line, export_line, option, option_of_logs


def job_name(run_dir: Path) -> str:
    """Name of a run's jobs, equal for all of its chain and for no other run: dependency=singleton goes by it."""
    return slurm_quoting.job_name("megalite", run_dir)


def render(run_dir: Path, cluster: ClusterConfig, placement: Placement) -> str:
    """The batch script.

    Args:
        run_dir: of the run; its launch folder is complete.
        cluster: where it will run.
        placement: of its ranks.

    Raises:
        UserError: Slurm cannot be told the run's folder.
    """
    check_log_folder(run_dir, "run.dir")
    folder = LaunchFolder(run_dir.absolute())
    title = f"# {placement.mesh.world_size} ranks of {run_dir}, by `megalite launch`"
    command = [sys.executable, "-m", "megalite.slurm.supervise", str(folder.run_dir)]
    lines = [*environment_lines(cluster), f"exec {command_line(command)}"]
    return render_script(sbatch_options(folder, cluster, placement), [title], lines)


def render_script(options: Iterable[str], title: Iterable[str], lines: Iterable[str]) -> str:
    """A batch script with options for sbatch, comments above them, and shell lines below."""
    return "\n".join(["#!/bin/bash", *title, *map(slurm_quoting.directive, options), *lines, ""])


def environment_lines(cluster: ClusterConfig) -> list[str]:
    """Shell lines that make a node ready for megalite."""
    return [*cluster.setup, *(export_line(name, value) for name, value in cluster.environment.items())]


def place_options(cluster: ClusterConfig, *names: str) -> list[str]:
    """Options that say where a job may run, those of the profile's keys that are set."""
    return [option(name, value) for name in names if (value := getattr(cluster, name)) is not None]


def sbatch_options(folder: LaunchFolder, cluster: ClusterConfig, placement: Placement) -> list[str]:
    """Options of sbatch, one a line."""
    gpus = min(cluster.gpus_per_node, placement.ranks_per_node)
    return [
        option("job-name", job_name(folder.run_dir)),
        option("nodes", num_nodes(placement, cluster)),
        *place_options(cluster, "partition", "account", "qos", "constraint"),
        *([option("gpus-per-node", gpus)] if gpus else []),
        # one task a node, the agent: with a number of tasks Slurm takes the least of a range of nodes
        option("cpus-per-task", placement.ranks_per_node * (cluster.cpus_per_rank or 1)),
        option("time", cluster.time_limit),
        option("signal", f"B:USR1@{cluster.save_seconds}"),  # to the supervisor alone
        "--no-kill",  # a lost node is ours to replace
        "--no-requeue",  # the next job of the chain is in the queue already, and starts without Slurm's two minutes
        "--dependency=singleton",
        "--kill-on-invalid-dep=yes",
        "--open-mode=append",
        option_of_logs(folder.jobs, "%j.log"),
        *cluster.sbatch,
    ]


def num_nodes(placement: Placement, cluster: ClusterConfig) -> str:
    """How many nodes a job asks for: with spares if there are any left, without them rather than wait."""
    least = placement.num_nodes
    return f"{least}-{least + cluster.spares}" if cluster.spares else f"{least}"
