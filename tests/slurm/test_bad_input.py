"""What cannot be launched is refused before anything is submitted, with what to do."""

from __future__ import annotations

import subprocess
from pathlib import Path

import yaml

from tests.kit.runs import COMMAND, clean_environment, write_run
from tests.slurm.launched import SECTIONS

PROFILE = {"gpus_per_node": 0, "ranks_per_node": 2}


def launch(environment: dict[str, str], config: Path, *arguments: str, **profile) -> subprocess.CompletedProcess:
    """`megalite launch` with a profile."""
    path = config.parent / "profile.yaml"
    path.write_text(yaml.safe_dump({**PROFILE, **profile}))
    command = [*COMMAND, "launch", str(config), "--cluster", str(path), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)


def test_no_slurm(tmp_path):
    """Without Slurm's commands."""
    done = launch({**clean_environment(), "PATH": str(tmp_path)}, write_run(tmp_path, **SECTIONS))
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert "there is no squeue here; run this on a login node of a Slurm cluster" in " ".join(done.stderr.split())


def test_refusals_on_a_cluster(tmp_path, cluster):
    """A partition that is not there, GPUs and nodes that are not there, a limit shorter than a save, a folder that
    cannot be written: each in a sentence, and nothing gets into the queue."""
    config = write_run(tmp_path, **SECTIONS)
    for arguments, profile, sentence in [
        ((), {"partition": "gpu"}, "partition: sinfo shows no gpu; there are urgent, brief, main"),
        ((), {"gpus_per_node": 4}, "gpus_per_node: found 4, and nodes of main have at most 2; set it to 2"),
        ((), {"spares": 12}, "13 nodes are needed, spares included, and main has 9"),
        ((), {"save_seconds": 70000, "time_limit": "2-0"}, "save_seconds"),
        ((), {"time_limit": "2:00"}, "time_limit: 2:00 is 120 s, and 120 s of it are for saving"),
        (("run.dir=/proc/run",), {}, "run.dir: /proc/run cannot be written"),
    ]:
        done = launch(cluster.environment, config, *arguments, **profile)
        said = " ".join(done.stderr.split())
        assert (done.returncode, "Traceback" in said) == (2, False), said
        assert sentence in said
    assert cluster.live_jobs() == []
    assert not (tmp_path / "run" / "slurm").exists()


def test_a_profile_from_the_cluster(tmp_path, cluster):
    """`--cluster auto` fills one in from what Slurm says: its default partition, two GPUs a node, no limit."""
    config = write_run(tmp_path, **SECTIONS)
    command = [*COMMAND, "launch", str(config), "--cluster", "auto", "--dry-run", "-s", "spares=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=cluster.environment, check=False)
    assert done.returncode == 0, done.stderr
    for option in ("--partition=main", "--nodes=1-2", "--gpus-per-node=2", "--time=24:00:00"):
        assert f"#SBATCH {option}\n" in done.stdout
    assert cluster.live_jobs() == []
