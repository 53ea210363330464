"""The scripts that are submitted, and the commands that start ranks: containers too, which no machine here has."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest

from megalite.config.load import load_config
from megalite.errors import ConfigError
from megalite.slurm.agents import python_command, step_options
from megalite.slurm.cluster import ClusterConfig, ContainerConfig, EvaluationConfig, load_cluster
from megalite.slurm.evaluate import render_evaluation
from megalite.slurm.folder import LaunchFolder
from megalite.slurm.placement import place
from megalite.slurm.render import sbatch_options
from tests.kit.paths import ROOT

APPTAINER = {"image": "/images/m.sif", "mounts": ["/data", "/scratch:/s"]}
PYXIS = {"runtime": "pyxis", "image": "m.sqsh", "mounts": ["/data:/data", "/s:/s"]}


@pytest.mark.parametrize(
    ("container", "options", "agent", "rank"),
    [
        (None, "", sys.executable, sys.executable),
        (
            APPTAINER,
            "",
            sys.executable,
            "apptainer exec --nv --bind /data --bind /scratch:/s /images/m.sif python",
        ),
        (PYXIS, "--container-image=m.sqsh --container-mounts=/data:/data,/s:/s", "python", "python"),
        ({"runtime": "pyxis", "image": "m.sqsh"}, "--container-image=m.sqsh", "python", "python"),
    ],
)
def test_ranks_in_containers(container, options, agent, rank):
    """What srun is told, and the Python of agents and of what they start: Apptainer is around each rank, pyxis around
    the agent."""
    settings = ContainerConfig(**container) if container else None
    assert shlex.join(step_options(settings)) == options
    assert shlex.join(python_command(settings, is_step=True)) == agent
    assert shlex.join(python_command(settings, is_step=False)) == rank


def test_spares_are_asked_for_and_not_waited_for(tmp_path):
    """A range of nodes: two dead ones of four stopped a chain whose layout needs two. Slurm takes the least of a range
    when it is told a number of tasks."""
    config = load_config(ROOT / "configs/debug.yaml", ["parallel.dp=4", "batch.micro_batch_size=1"])
    for spares, nodes in ((0, "2"), (2, "2-4")):
        cluster = ClusterConfig(gpus_per_node=0, ranks_per_node=2, cpus_per_rank=3, spares=spares)
        options = sbatch_options(LaunchFolder(tmp_path), cluster, place(config, cluster))
        assert f"--nodes={nodes}" in options
        assert "--cpus-per-task=6" in options
        assert not [option for option in options if option.startswith("--ntasks")]


def test_an_evaluation_job(tmp_path):
    """The script runs the command for the checkpoint and the step that it is given, and says when that is gone."""
    cluster = ClusterConfig(partition="gpu", setup=("cd /",), environment={"A": "b c"})
    evaluation = EvaluationConfig(
        command="true && echo $A {checkpoint} {step} {run} {{}}", gpus=1, sbatch=("--mem=8G",)
    )
    script = tmp_path / "evaluate.sbatch"
    script.write_text(render_evaluation(tmp_path / "my run", cluster, evaluation))
    options = [line.removeprefix("#SBATCH ") for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    assert {"--partition=gpu", "--gpus-per-node=1", "--mem=8G", "--dependency=singleton"} <= set(options)
    checkpoint = tmp_path / "step 7"
    checkpoint.mkdir()
    done = subprocess.run(["bash", script, checkpoint, "7"], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"b c {checkpoint} 7 {tmp_path}/my run {{}}\n"
    gone = subprocess.run(
        ["bash", script, tmp_path / "no", "8"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (gone.returncode, gone.stderr) == (
        1,
        "checkpoint 8 is gone; raise checkpoint.keep_last, or set checkpoint.keep_every\n",
    )


def test_a_command_with_an_unknown_name(tmp_path):
    """Refused when the profile is read."""
    path = tmp_path / "c.yaml"
    path.write_text("evaluation: {command: 'run {chekpoint}'}\n")
    with pytest.raises(ConfigError, match=r"c.yaml:1: evaluation.command: .*use \{checkpoint\}, \{step\} and \{run\}"):
        load_cluster(path)
