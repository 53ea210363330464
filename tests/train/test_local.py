"""Ranks of one machine: watched over and started again, or started by torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megalite.train import local
from tests.kit.paths import ROOT
from tests.kit.runs import clean_environment, megalite, metrics, start, wait_for_step, write_run

NUM_STEPS = 60

SECTIONS = {
    "parallel": {"tp": 1, "dp": 2, "zero_stage": 1},
    "batch": {"micro_batch_size": 2, "global_batch_size": 32, "seq_len": 32},
    "train": {"steps": NUM_STEPS, "device": "cpu"},
    "checkpoint": {"every": 5},
    "monitor": {"log_every": 50, "tensorboard": False},
    "slurm": {"beat_seconds": 3, "start_seconds": 200, "step_seconds": 60},
}

TIMEOUT_SECONDS = 400.0


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> list[dict]:
    """The steps of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = megalite("train", write_run(folder, **SECTIONS), timeout=TIMEOUT_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return metrics(folder / "run")


def assert_equal(found: list[dict], expected: list[dict]) -> None:
    """Bit for bit."""
    for key in ("step", "loss", "grad_norm", "tokens"):
        assert [row[key] for row in found] == [row[key] for row in expected]


def rank_processes(folder: Path) -> list[int]:
    """Process numbers of the ranks that a command has started last, in their order."""
    return [int((folder / f"rank-{rank}").read_text()) for rank in range(2)]


def test_a_run_is_started_again(tmp_path, undisturbed):
    """A rank is killed, then one is frozen: both are named, the run goes on each time, and its steps are those of an
    undisturbed one. A fault with every attempt ends it."""
    config = write_run(tmp_path, **SECTIONS)
    run = start("train", config, "--max-failures", "2", processes=tmp_path)
    wait_for_step(tmp_path / "run", 8, run, TIMEOUT_SECONDS)
    first = rank_processes(tmp_path)
    os.kill(first[1], signal.SIGKILL)
    wait_for_step(tmp_path / "run", 25, run, TIMEOUT_SECONDS)
    second = rank_processes(tmp_path)
    assert not set(first) & set(second)
    os.kill(second[0], signal.SIGSTOP)
    said = run.communicate(timeout=TIMEOUT_SECONDS)[0]
    assert run.returncode == 0, said
    assert "rank 1 ended with SIGKILL" in said
    assert "rank 0: no heartbeat for" in said
    assert said.count("starting again from step") == 2
    assert "loop.py" in (tmp_path / "run" / "logs" / "stacks-1.txt").read_text()
    assert_equal(metrics(tmp_path / "run"), undisturbed)


def test_each_rank_has_its_share_of_the_cores(tmp_path, monkeypatch):
    """Unless the user has said how many threads, and never none."""
    monkeypatch.setattr(local, "num_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = [local.rank_environment(0, world_size, tmp_path)["OMP_NUM_THREADS"] for world_size in (1, 3, 16)]
    assert found == ["8", "2", "1"]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert local.rank_environment(0, 2, tmp_path)["OMP_NUM_THREADS"] == "5"


def test_torchrun_gives_the_ranks(tmp_path, undisturbed):
    """`torchrun launch/launch.py CONFIG` trains as `megalite train CONFIG` does."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**clean_environment(), "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*command, ROOT / "launch" / "launch.py", write_run(tmp_path, **SECTIONS)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert_equal(metrics(tmp_path / "run"), undisturbed)
