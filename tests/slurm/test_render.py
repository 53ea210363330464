"""The scripts that are submitted, and the commands that start ranks: containers too, which no machine here has."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from megalite.errors import ConfigError
from megalite.slurm.attempt import rank_command
from megalite.slurm.cluster import ClusterConfig, ContainerConfig, EvaluationConfig, load_cluster
from megalite.slurm.evaluate import render_evaluation


@pytest.mark.parametrize(
    ("container", "expected"),
    [
        (None, "PYTHON -m megalite.slurm.rank /run"),
        (
            {"image": "/images/m.sif", "mounts": ["/data", "/scratch:/s"]},
            "apptainer exec --nv --bind /data --bind /scratch:/s /images/m.sif python -m megalite.slurm.rank /run",
        ),
        (
            {"runtime": "pyxis", "image": "m.sqsh", "mounts": ["/data:/data", "/s:/s"]},
            "--container-image=m.sqsh --container-mounts=/data:/data,/s:/s python -m megalite.slurm.rank /run",
        ),
        ({"runtime": "pyxis", "image": "m.sqsh"}, "--container-image=m.sqsh python -m megalite.slurm.rank /run"),
    ],
)
def test_ranks_in_containers(container, expected):
    """What follows srun's own options: nothing, Apptainer's command, or pyxis' options and the image's own Python."""
    settings = ContainerConfig(**container) if container else None
    assert shlex.join(rank_command(settings, "PYTHON", Path("/run"))) == expected


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
