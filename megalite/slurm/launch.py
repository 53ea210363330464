"""From a config and a cluster profile to a submitted job: everything checked, everything written down, then sbatch."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from megalite.config.load import dump_config, in_folder
from megalite.config.schema import Config
from megalite.errors import ConfigError, UserError
from megalite.slurm.cluster import ClusterConfig, dump_cluster, seconds_of
from megalite.slurm.controller import Controller
from megalite.slurm.detect import check_cluster
from megalite.slurm.evaluate import render_evaluation
from megalite.slurm.folder import LaunchFolder
from megalite.slurm.placement import Placement, place
from megalite.slurm.render import job_name, render
from megalite.slurm_quoting import option
from megalite.train.preflight import preflight

SHORTEST_WORK_SECONDS = 60
"""Between a job's start and its request to save; a shorter limit would only start and stop."""


@dataclass(frozen=True)
class Launch:
    """What will be, or was, submitted."""

    placement: Placement
    script: str
    folder: LaunchFolder


def plan_launch(config: Config, cluster: ClusterConfig, num_nodes: int | None = None) -> Launch:
    """Check the layout and the cluster, and make the batch script; nothing is written.

    Args:
        config: of the run.
        cluster: where it will run.
        num_nodes: nodes for ranks, spares not counted; None takes what the layout needs.

    Raises:
        ConfigError: the layout does not fit the cluster, or the time limit is shorter than a save.
    """
    placement = place(config, cluster, num_nodes)
    limit, least = seconds_of(cluster.time_limit), cluster.save_seconds + SHORTEST_WORK_SECONDS
    if limit < least:
        raise ConfigError(
            [
                f"time_limit: {cluster.time_limit} is {limit} s, and {cluster.save_seconds} s of it are for saving "
                f"(save_seconds); give at least {least} s"
            ]
        )
    run_dir = config.run.dir.absolute()
    return Launch(placement, render(run_dir, cluster, placement), LaunchFolder(run_dir))


def launch(config: Config, cluster: ClusterConfig, num_nodes: int | None = None) -> tuple[Launch, str]:
    """Write the launch folder and submit the first job.

    Returns:
        What was submitted, and the job's number.

    Raises:
        UserError: something is wrong with the config, the data, the folder or the cluster, or the run is live already.
    """
    planned = plan_launch(config, cluster, num_nodes)
    controller, folder = Controller(), planned.folder
    _refuse_second(controller, folder)
    check_cluster(cluster, planned.placement.num_nodes + cluster.spares)
    absolute = in_folder(config, folder.run_dir)
    preflight(absolute, planned.placement.mesh.world_size, has_device=False)  # which the nodes say (`node_check`)
    folder.finished.unlink(missing_ok=True)  # more steps may have been asked for
    folder.jobs.mkdir(parents=True, exist_ok=True)
    folder.config.write_text(dump_config(absolute), encoding="utf-8")
    folder.cluster.write_text(dump_cluster(cluster), encoding="utf-8")
    folder.script.write_text(planned.script, encoding="utf-8")
    folder.script.chmod(0o755)
    if cluster.evaluation is not None:
        folder.evaluations.mkdir(exist_ok=True)
        script = render_evaluation(folder.run_dir, cluster, cluster.evaluation)
        folder.evaluation_script.write_text(script, encoding="utf-8")
    folder.say_waiting("", time.time())
    former = folder.known_state()  # no job is live, so nobody misses what was damaged
    folder.replace_state(former)
    folder.write_state(
        status="submitted",
        why=None,  # a former launch may have left one
        stragglers=[],
        num_nodes=planned.placement.num_nodes,
        ranks_per_node=planned.placement.ranks_per_node,
        failures_without_progress=0,
        num_jobs=1,
        next_job=None,
    )
    try:
        job = controller.submit(str(folder.script), option("chdir", os.getcwd()))
    except UserError:
        folder.replace_state(former)  # nobody is to wait for a job that is none
        raise
    folder.write_state(job=job)
    folder.add_event("launched", job=job)
    return planned, job


def _refuse_second(controller: Controller, folder: LaunchFolder) -> None:
    live = controller.live_jobs(job_name(folder.run_dir))
    if live:
        raise UserError(
            f"{folder.run_dir} is live: job {', '.join(live)}; see `megalite launch status`, or end it with "
            "`megalite launch stop`"
        )
    if folder.stop.exists():
        raise UserError(f"{folder.stop} asks the run to stop; remove that file, then launch again")
