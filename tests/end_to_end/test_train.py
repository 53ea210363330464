"""Whole runs: what they leave behind, exact resume, clean stops, and damage that must not cost a run."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.kit.runs import events, megalite, metrics, start, wait_for_step, write_run

METRIC_KEYS = {
    "step",
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "valid_tokens",
    "tokens_per_second",
    "mfu",
    "skipped",
    "seconds",
    "memory_bytes",
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """A run of six steps with a checkpoint at step 3."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = megalite("train", write_run(folder, checkpoint={"every": 3}, train={"steps": 6, "eval_every": 3}))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def checkpoint_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint's files."""
    return {key: tensor for path in sorted(folder.glob("*.safetensors")) for key, tensor in load_file(path).items()}


def test_run_folder_has_everything(undisturbed):
    """The files that users and tools rely on, with the keys they rely on."""
    run = undisturbed / "run"
    for name in (
        "config.yaml",
        "plan.json",
        "report.html",
        "metrics.jsonl",
        "events.jsonl",
        "tensorboard",
        "logs/rank-1.log",
    ):
        assert (run / name).exists(), name
    records = metrics(run)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert all(set(record) == METRIC_KEYS for record in records)
    assert [record["tokens"] for record in records] == [128 * step for step in range(1, 7)]
    assert records[0]["lr"] == pytest.approx(3e-4 / 2)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-0000003", "step-0000006"]
    kinds = [event["event"] for event in events(run) if event["event"] != "save_started"]
    assert kinds == ["start", "validation", "save", "validation", "save", "done"]
    assert json.loads((run / "plan.json").read_text())["grad_accum_steps"] == 2


def test_finished_run_is_not_done_again(undisturbed):
    """The same command on a finished run says so, exits 0 and changes nothing."""
    before = (undisturbed / "run" / "metrics.jsonl").read_text()
    again = megalite("train", undisturbed / "config.yaml")
    assert again.returncode == 0
    assert "done" in again.stdout
    assert (undisturbed / "run" / "metrics.jsonl").read_text() == before


def test_resume_is_bit_equal(undisturbed, tmp_path):
    """Going on from step 3 gives the same losses, norms, weights and moments to the last bit, and the same data."""
    shutil.copytree(undisturbed, tmp_path / "copy")
    run = tmp_path / "copy" / "run"
    shutil.rmtree(run / "checkpoints" / "step-0000006")
    done = megalite("train", undisturbed / "config.yaml", f"run.dir={run}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 3 of 6" in done.stdout
    keys = ("step", "loss", "grad_norm", "lr", "tokens")
    want, got = ([{key: r[key] for key in keys} for r in metrics(folder)] for folder in (undisturbed / "run", run))
    assert got == want
    last = "checkpoints/step-0000006"
    want, got = (checkpoint_tensors(folder / last) for folder in (undisturbed / "run", run))
    assert want.keys() == got.keys()
    assert all(torch.equal(want[key], got[key]) for key in want)
    chains = [json.loads((folder / last / "manifest.json").read_text()) for folder in (undisturbed / "run", run)]
    assert chains[0]["progress"] == chains[1]["progress"]


def test_resume_on_another_layout(undisturbed, tmp_path):
    """The run goes on as pp 2 with the same losses to float tolerance."""
    shutil.copytree(undisturbed / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-0000006")
    done = megalite(
        "train", undisturbed / "config.yaml", f"run.dir={tmp_path / 'run'}", "parallel.tp=1", "parallel.pp=2"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    want, got = ([record["loss"] for record in metrics(folder)] for folder in (undisturbed / "run", tmp_path / "run"))
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_damaged_checkpoint_is_passed_over(undisturbed, tmp_path):
    """A flipped byte in the newest checkpoint: the run says so and goes on from the one before it."""
    run = tmp_path / "run"
    shutil.copytree(undisturbed / "run", run)
    victim = run / "checkpoints" / "step-0000006" / "rank-00001.safetensors"
    data = bytearray(victim.read_bytes())
    data[-5] ^= 1
    victim.write_bytes(data)
    done = megalite("train", undisturbed / "config.yaml", f"run.dir={run}", "train.steps=7")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank-00001.safetensors: its checksum differs" in done.stdout
    assert any(event["event"] == "damaged_checkpoint" for event in events(run))
    aside = run / "checkpoints" / "damaged-step-0000006"
    assert f"it is kept as {aside}" in done.stdout
    mended = bytearray((aside / "rank-00001.safetensors").read_bytes())
    mended[-5] ^= 1
    (aside / "rank-00001.safetensors").write_bytes(mended)
    for path in (run / "checkpoints").glob("step-*"):
        shutil.rmtree(path)
    aside.rename(run / "checkpoints/step-0000006")  # as docs/checkpoints.md says
    done = megalite("train", undisturbed / "config.yaml", f"run.dir={run}", "train.steps=7")
    assert "step-0000006, step 6 of 7" in done.stdout
    assert [record["step"] for record in metrics(run)] == [1, 2, 3, 4, 5, 6, 7]


def test_no_whole_checkpoint_is_an_error(undisturbed, tmp_path):
    """When every checkpoint is damaged the run refuses, names the files, and exits 2."""
    run = tmp_path / "run"
    shutil.copytree(undisturbed / "run", run)
    for path in run.glob("checkpoints/*/rank-00000.safetensors"):
        path.write_bytes(path.read_bytes()[:-10])
    done = megalite("train", undisturbed / "config.yaml", f"run.dir={run}", "train.steps=7")
    assert done.returncode == 2
    assert "no checkpoint of this run is whole" in done.stderr
    assert "expected" in done.stderr
    assert "Traceback" not in done.stderr.split("megalite: ")[-1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_signal_saves_and_stops(tmp_path, number):
    """SIGTERM and SIGINT: the step is finished, a checkpoint written, exit code 3, and the run can go on. Killed, the
    parent cannot tell its ranks, which do the same and train no further as orphans."""
    config = write_run(tmp_path, train={"steps": 2000})
    process = start("train", config)
    wait_for_step(tmp_path / "run", 2, process)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == (-number if number == signal.SIGKILL else 3), output
    last = metrics(tmp_path / "run")[-1]["step"]
    assert (tmp_path / "run" / "checkpoints" / f"step-{last:07d}" / "manifest.json").exists()
    assert events(tmp_path / "run")[-1] == {**events(tmp_path / "run")[-1], "event": "stop", "step": last}


@pytest.mark.parametrize("phase", ["importing PyTorch", "meeting the other ranks"])
def test_stop_during_start(tmp_path, phase: str):
    """Ctrl-C while PyTorch is imported or before a rank listens is not lost: exit code 3, no traceback."""
    process = start("train", write_run(tmp_path, train={"steps": 2000}), is_fresh=True)
    said: list[str] = []
    while not said or phase not in said[-1]:
        said.append(process.stdout.readline())
        assert said[-1], "".join(said)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 3, output
    assert "stopped before the first step" in output
    assert "Traceback" not in output


def test_kill_9_loses_nothing_saved(tmp_path):
    """kill -9 of everything while checkpoints are written at every step: the next start takes a complete one."""
    config = write_run(tmp_path, train={"steps": 400}, checkpoint={"every": 1}, model={"hidden_size": 256})
    process = start("train", config, processes=tmp_path)
    wait_for_step(tmp_path / "run", 5, process)
    for each in (*ranks(tmp_path), process.pid):
        kill(each)
    process.communicate(timeout=60)
    found = sorted((tmp_path / "run" / "checkpoints").glob("step-*/manifest.json"))
    assert found
    newest = int(found[-1].parent.name.removeprefix("step-"))
    done = megalite("train", config, f"train.steps={newest + 2}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"step {newest} of {newest + 2}" in done.stdout
    assert [record["step"] for record in metrics(tmp_path / "run")] == list(range(1, newest + 3))
    assert not list((tmp_path / "run" / "checkpoints").glob(".partial-*"))


def test_dead_rank_ends_the_run_with_its_name(tmp_path):
    """A rank killed from outside: the others are ended, and the message says which one and how."""
    config = write_run(tmp_path, train={"steps": 2000})
    process = start("train", config, processes=tmp_path)
    wait_for_step(tmp_path / "run", 2, process)
    kill(ranks(tmp_path)[1])
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "rank 1 ended with SIGKILL" in output


def ranks(folder: Path) -> list[int]:
    """Process numbers, which the ranks have left there."""
    return [int((folder / f"rank-{number}").read_text()) for number in range(2)]


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
