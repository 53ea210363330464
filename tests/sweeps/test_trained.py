"""Sweeps that really train, through the command line."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from megalite.checkpoint.catalog import latest
from megalite.checkpoint.reader import CheckpointReader
from megalite.errors import EXIT_REQUEUE
from tests.kit.runs import megalite, metrics, start, write_run
from tests.train.test_schedules import assert_equal_checkpoints

ONE_RANK = {
    "parallel": {"tp": 1, "zero_stage": 0},
    "monitor": {"log_every": 50, "tensorboard": False},
    "train": {"steps": 12, "eval_batches": 2, "device": "cpu", "compile": "off"},
}


def result(done: subprocess.CompletedProcess) -> dict:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_halving_trains_the_whole_run_in_parts(tmp_path):
    """Trials are run folders; a diverged one is written down and does not end the sweep; the survivor of three rungs
    has the checkpoint, to the last bit, of a run that was never halved, with the decay of its wsd schedule."""
    sections = {**ONE_RANK, "schedule": {"name": "wsd", "warmup_steps": 2, "decay_steps": 3}}
    config = write_run(tmp_path, **sections)
    path = tmp_path / "sweep.yaml"
    path.write_text(
        f"config: {config}\ndir: {tmp_path / 'sweep'}\nhalving: {{min_steps: 3, factor: 2}}\n"
        "space: {optimizer.lr: [1.0e-2, 1.0e+18]}\n"
    )
    found = result(megalite("sweep", path, "--json"))
    assert [each["state"] for each in found["trials"]] == ["done", "diverged"]
    assert [rung["steps"] for rung in found["best"]["rungs"]] == [3, 6, 12]
    assert found["best"]["overrides"] == ["optimizer.lr=0.01"]
    trial = tmp_path / "sweep" / "trial-0001"
    assert [each["step"] for each in metrics(trial)] == list(range(1, 13))
    whole = megalite("train", config, "optimizer.lr=0.01", f"run.dir={tmp_path / 'whole'}")
    assert whole.returncode == 0, whole.stderr
    one, other = CheckpointReader(latest(trial)), CheckpointReader(latest(tmp_path / "whole"))
    assert one.manifest.progress.data_chain == other.manifest.progress.data_chain
    assert any(name.startswith("exp_avg/") for name in one.manifest.tensors)
    for name in other.manifest.tensors:
        assert all(torch.equal(x, y) for x, y in zip(one.slabs(name), other.slabs(name), strict=True)), name
    assert (tmp_path / "sweep" / "sweep.html").is_file()


LONG = {**ONE_RANK, "train": {**ONE_RANK["train"], "steps": 150}, "checkpoint": {"every": 10}}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """A run that nobody stopped."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = megalite("train", write_run(folder, **LONG), "run.seed=1")
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_sweep_that_is_stopped_goes_on(tmp_path, undisturbed, how):
    """Asked to stop it ends with exit code 3, killed it takes its trial with it; the trial in the middle goes on from
    its checkpoint and ends as one that was never stopped."""
    config = write_run(tmp_path, **LONG)
    arguments = ("sweep", config, "--over", "run.seed=[1]", "--dir", str(tmp_path / "sweep"), "--json")
    process = start(*arguments)
    first = tmp_path / "sweep" / "trial-0001"
    deadline = time.monotonic() + 120
    while latest(first) is None and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(how)
    code = process.wait(60)
    process.stdout.close()
    assert code == (EXIT_REQUEUE if how == signal.SIGINT else -signal.SIGKILL)
    while _is_at_work(first) and time.monotonic() < deadline:
        time.sleep(0.05)
    found = result(megalite(*arguments))
    assert [each["state"] for each in found["trials"]] == ["done"]
    starts = [json.loads(line) for line in (first / "events.jsonl").read_text().splitlines() if '"start"' in line]
    assert len(starts) == 2
    assert starts[1]["step"] >= 10
    assert_equal_checkpoints(latest(first), latest(undisturbed))


def _is_at_work(folder: Path) -> bool:
    """Whether a process trains there: one that was told that its parent has gone saves, and ends."""
    found = subprocess.run(["pgrep", "-f", f"{folder.parent}/configs"], capture_output=True, check=False)
    return found.returncode == 0
