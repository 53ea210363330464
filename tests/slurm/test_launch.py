"""`megalite launch` on a real Slurm cluster: whatever fails, the run ends with the losses of an undisturbed one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from megalite.checkpoint.catalog import latest
from megalite.checkpoint.format import read_manifest
from megalite.slurm.folder import LaunchFolder
from megalite.slurm.goodput import measure
from tests.kit.runs import COMMAND, megalite, metrics, write_run
from tests.kit.slurm import Cluster, until

NUM_STEPS = 150

RUN_SECTIONS = {
    "parallel": {"tp": 1, "dp": 2, "zero_stage": 1},
    "batch": {"micro_batch_size": 2, "global_batch_size": 48, "seq_len": 32},
    "train": {"steps": NUM_STEPS, "device": "cpu"},
    "checkpoint": {"every": 10},
    "monitor": {"log_every": 50, "tensorboard": False},
    "slurm": {"beat_seconds": 10, "start_seconds": 120, "step_seconds": 60, "max_failures": 4},
}

PROFILE = {
    "gpus_per_node": 0,
    "ranks_per_node": 1,
    "time_limit": "20:00",
    "save_seconds": 60,
    "spares": 1,
    "environment": {"OMP_NUM_THREADS": "1"},  # as two ranks of one machine have: another number rounds otherwise
}

ENDED = ("finished", "stopped", "gave up", "cancelled")


class Launched:
    """A run on the cluster."""

    def __init__(self, folder: Path, cluster: Cluster, **profile):
        self.cluster = cluster
        self.config = write_run(folder, **RUN_SECTIONS)
        self.profile = folder / "cluster.yaml"
        self.profile.write_text(yaml.safe_dump({**PROFILE, **profile}))
        self.folder = LaunchFolder(folder / "run")
        self.launch()

    def launch(self) -> None:
        """Submit its first job."""
        done = self.megalite("launch", self.config, "--cluster", self.profile)
        assert done.returncode == 0, done.stdout + done.stderr

    def megalite(self, *arguments: str | Path) -> subprocess.CompletedProcess:
        """A command on the login node."""
        command = [*COMMAND, *map(str, arguments)]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=120, env=self.cluster.environment, check=False
        )

    def wait_for_step(self, step: int, attempt: int) -> None:
        """Wait until an attempt has done a step."""

        def is_there() -> bool:
            path = self.folder.run_dir / "metrics.jsonl"
            state = self.folder.read_state()
            assert state["status"] not in ENDED, self.log()
            return state.get("attempt") == attempt and path.exists() and self._last_step(path) >= step

        until(is_there, f"step {step} in attempt {attempt}", 180)

    def wait_for_end(self) -> str:
        """Wait until the run has ended; its status."""
        until(lambda: self.folder.read_state()["status"] in ENDED, "the end of the run", 240)
        until(lambda: not self.cluster.live_jobs(), "an empty queue")
        return self.folder.read_state()["status"]

    def rank_process(self, rank: int) -> int:
        """A rank's process number on this machine."""
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal():
                continue
            try:
                command, environment = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
            except OSError:
                continue
            variables = dict(line.partition(b"=")[::2] for line in environment.split(b"\0"))
            is_rank = b"megalite.slurm.rank" in command and str(self.folder.run_dir).encode() in command
            if is_rank and b"srun" not in command and variables.get(b"SLURM_PROCID") == str(rank).encode():
                return int(entry.name)
        raise AssertionError(f"rank {rank} has no process\n{self.log()}")

    def ends(self) -> list[str]:
        """Why each attempt ended."""
        return [event["why"] for event in self.folder.read_events() if event["event"] == "end"]

    def log(self) -> str:
        """What the supervisors said."""
        return "\n".join(path.read_text() for path in sorted(self.folder.jobs.glob("*.log")))

    @staticmethod
    def _last_step(path: Path) -> int:
        lines = path.read_text().splitlines()
        return json.loads(lines[-1])["step"] if lines else 0


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """The same run without a cluster."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = megalite("train", write_run(folder, **RUN_SECTIONS))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


def assert_as_undisturbed(run_dir: Path, undisturbed: Path) -> None:
    """Every step's loss and norm, bit for bit, and every sample consumed once, in order."""
    found, expected = metrics(run_dir), metrics(undisturbed)
    for key in ("step", "loss", "grad_norm", "tokens"):
        assert [row[key] for row in found] == [row[key] for row in expected]
    progress, wanted = (read_manifest(latest(folder)).progress for folder in (run_dir, undisturbed))
    assert progress == wanted


@pytest.mark.slow
def test_a_bad_day(tmp_path, cluster, undisturbed):
    """A rank killed, a rank frozen, a node powered off: each is named, and the run goes on, at last on a spare; its
    losses are those of a run that nothing happened to."""
    run = Launched(tmp_path, cluster)
    run.wait_for_step(15, attempt=1)
    os.kill(run.rank_process(1), signal.SIGKILL)
    run.wait_for_step(45, attempt=2)
    os.kill(run.rank_process(0), signal.SIGSTOP)
    run.wait_for_step(75, attempt=3)
    batch_host = run.cluster.slurm("squeue", "--noheader", f"--jobs={run.folder.read_state()['job']}", "--format=%B")
    victim = next(node for node in run.folder.read_state()["nodes"] if node != batch_host)
    run.cluster.testbed("crash", victim)
    assert run.wait_for_end() == "finished", run.log()
    killed, frozen, crashed, done = run.ends()
    assert "rank 1 on" in killed
    assert "Killed" in killed
    assert "rank 0 on" in frozen
    assert "no heartbeat for" in frozen
    assert victim in crashed
    assert done == "all ranks are done"
    assert victim not in run.folder.read_state()["nodes"]
    assert "train_step" in (run.folder.attempt(2) / "stacks-00001.txt").read_text()  # of the rank that waited
    assert_as_undisturbed(run.folder.run_dir, undisturbed)
    for each in measure(run.folder, time.time()).attempts:
        print(f"attempt {each.attempt}: {each.total:.0f} s, starting {each.starting:.0f}, lost {each.lost:.0f}")


@pytest.mark.slow
def test_the_chain_goes_on(tmp_path, cluster, undisturbed):
    """The first job's own node is powered off; the next one is warned of its time limit; both hand the run on."""
    run = Launched(tmp_path, cluster, spares=0)
    run.wait_for_step(15, attempt=1)
    first_job = run.folder.read_state()["job"]
    cluster.testbed("crash", cluster.slurm("squeue", "--noheader", f"--jobs={first_job}", "--format=%B"))
    run.wait_for_step(45, attempt=2)
    second_job = run.folder.read_state()["job"]
    assert second_job != first_job
    cluster.slurm("scancel", "--batch", "--signal=USR1", second_job)  # as Slurm does before the limit
    assert run.wait_for_end() == "finished", run.log()
    assert len({event["job"] for event in run.folder.read_events() if event["event"] == "job"}) == 3
    assert_as_undisturbed(run.folder.run_dir, undisturbed)


@pytest.mark.slow
def test_a_person_ends_it(tmp_path, cluster, undisturbed):
    """SAVE saves and goes on; a second launch is refused; `stop` ends the chain; scancel does; a launch goes on."""
    run = Launched(tmp_path, cluster, spares=0)
    run.wait_for_step(3, attempt=1)
    (run.folder.run_dir / "SAVE").touch()
    until(lambda: not (run.folder.run_dir / "SAVE").exists(), "the request to save to be seen")
    until(lambda: latest(run.folder.run_dir) is not None, "a checkpoint")
    refused = run.megalite("launch", run.config, "--cluster", run.profile)
    assert refused.returncode == 2
    assert "is live: job" in refused.stderr

    assert run.megalite("launch", "stop", run.folder.run_dir).returncode == 0
    assert run.wait_for_end() == "stopped"
    refused = run.megalite("launch", run.config, "--cluster", run.profile)
    assert (refused.returncode, "asks the run to stop; remove that file" in refused.stderr) == (2, True)
    run.folder.stop.unlink()

    run.launch()
    run.wait_for_step(40, attempt=2)
    run.cluster.slurm("scancel", run.folder.read_state()["job"])
    assert run.wait_for_end() == "cancelled", run.log()
    run.launch()
    assert run.wait_for_end() == "finished", run.log()
    shown = run.megalite("launch", "status", run.folder.run_dir).stdout
    assert f"step {NUM_STEPS} of {NUM_STEPS}" in shown
    assert "attempt 3" in shown
    assert_as_undisturbed(run.folder.run_dir, undisturbed)


@pytest.mark.slow
def test_a_run_beyond_help_says_so(tmp_path, cluster):
    """Bad input that only ranks can find ends the chain at once, with the message."""
    run_sections = {**RUN_SECTIONS, "checkpoint": {"every": 10, "max_failures": 1}}
    config = write_run(tmp_path, **run_sections)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step-0000005").mkdir()
    (tmp_path / "run" / "checkpoints" / "step-0000005" / "manifest.json").write_text("{}")
    run = Launched(tmp_path, cluster, spares=0)
    assert config == run.config
    assert run.wait_for_end() == "gave up"
    assert "no checkpoint of this run is whole" in run.folder.read_state()["why"]
    assert len(run.ends()) == 1
