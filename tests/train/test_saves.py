"""Saves within whole runs: what is written down, what is kept, and what a disk that fails for a while costs."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

from megalite.checkpoint import catalog, saving
from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.shares import write_share
from megalite.config.load import load_config
from megalite.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_REQUEUE
from tests.kit.runs import events, metrics, write_run
from tests.train.forked import launch

DP2 = {"tp": 1, "dp": 2, "zero_stage": 1}


def run(folder: Path, checkpoint: dict, prepare=None, stop_after: int | None = None, **sections) -> tuple[int, Path]:
    """Train six steps with saves as set; returns the exit code and the run's folder."""
    config = load_config(write_run(folder, parallel=DP2, checkpoint=checkpoint, **sections))
    return launch(config, 2, stop_after=stop_after, prepare=prepare), config.run.dir


def steps(run_dir: Path) -> list[int]:
    return [catalog.step_of(path) for path in catalog.complete(run_dir)]


def test_best_checkpoints_are_kept(tmp_path):
    """Every checkpoint says its own validation loss; the lowest stays, also over a restart, besides the newest."""
    settings = {"every": 1, "keep_last": 1, "keep_best": 1}
    train = {"steps": 6, "eval_every": 2, "eval_batches": 2, "device": "cpu"}
    code, folder = run(tmp_path, settings, stop_after=3, train=train)
    assert code == EXIT_REQUEUE
    code, folder = run(tmp_path, settings, train=train)
    assert code == EXIT_DONE
    losses = {event["step"]: event["loss"] for event in events(folder) if event["event"] == "validation"}
    assert set(losses) == {2, 4, 6}
    best = min(losses, key=losses.__getitem__)
    assert steps(folder) == sorted({best, 6})
    for path in catalog.complete(folder):
        assert catalog.validation_loss(path) == losses[catalog.step_of(path)]
        assert CheckpointReader(path).verify() == []
    starts = [(event["attempt"], event["step"]) for event in events(folder) if event["event"] == "start"]
    assert starts == [(1, 0), (2, 3)]


def test_every_save_is_written_down(tmp_path):
    """When it began, for how long training stood still, when it was committed, what was dropped; in the background and
    waited for, with equal checkpoints."""
    for name, asynchronous in (("behind", True), ("waited", False)):
        code, folder = run(tmp_path / name, {"every": 2, "keep_last": 1, "asynchronous": asynchronous})
        assert code == EXIT_DONE
        saves = [event for event in events(folder) if event["event"] == "save"]
        assert [event["step"] for event in events(folder) if event["event"] == "save_started"] == [2, 4, 6]
        assert [event["step"] for event in saves] == [2, 4, 6]
        assert [event["dropped"] for event in saves] == [[], ["step-0000002"], ["step-0000004"]]
        assert all(0 < event["stalled_seconds"] <= event["seconds"] for event in saves)
    waited, behind = (
        CheckpointReader(tmp_path / name / "run/checkpoints/step-0000006") for name in ("waited", "behind")
    )
    assert waited.manifest.tensors.keys() == behind.manifest.tensors.keys()
    for tensor in waited.manifest.tensors:
        assert all(torch.equal(a, b) for a, b in zip(waited.slabs(tensor), behind.slabs(tensor), strict=True)), tensor


def fail_at_steps_2_and_3() -> None:
    """Rank 1's disk is full for a while."""

    def write(folder: Path, *args, **kwargs):
        if dist.get_rank() == 1 and any(f"step-000000{step}" in folder.name for step in (2, 3)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_share(folder, *args, **kwargs)

    saving.write_share = write


def test_a_disk_that_is_full_for_a_while(tmp_path):
    """Two saves fail, with why, and the run goes on: no step is lost, the next save is whole."""
    code, folder = run(tmp_path, {"every": 1, "keep_last": 9}, fail_at_steps_2_and_3)
    assert code == EXIT_DONE
    failed = [event for event in events(folder) if event["event"] == "save_failed"]
    assert [(event["step"], event["failures_in_a_row"]) for event in failed] == [(2, 1), (3, 2)]
    assert all("rank 1: " in event["why"] and "No space left" in event["why"] for event in failed)
    assert steps(folder) == [1, 4, 5, 6]
    assert [record["step"] for record in metrics(folder)] == [1, 2, 3, 4, 5, 6]
    assert sorted(path.name for path in (folder / catalog.CHECKPOINTS).iterdir()) == [
        f"step-{step:07d}" for step in (1, 4, 5, 6)
    ]


def fail_always() -> None:
    """The disk stays full."""

    def write(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    saving.write_share = write


def test_a_disk_that_stays_full_ends_the_run(tmp_path):
    """After as many failures as are allowed, on all ranks together, with the reason and exit code 2."""
    code, folder = run(tmp_path, {"every": 1, "max_failures": 2}, fail_always)
    assert code == EXIT_BAD_INPUT
    assert [event["step"] for event in events(folder) if event["event"] == "save_failed"] == [1, 2]
    word = json.loads((folder / "logs/error-1.json").read_text())
    assert word["is_user_error"]
    assert "No space left" in word["message"]


def test_a_checkpoint_that_lost_its_manifest_or_its_name_is_named(tmp_path):
    """It was whole when it got its name, so a run that passes over it says so; one with another's is told, and kept."""
    code, folder = run(tmp_path, {"every": 2, "keep_last": 9})
    assert code == EXIT_DONE
    (folder / "checkpoints/step-0000006/manifest.json").unlink()
    (folder / "checkpoints/step-0000002").rename(folder / "checkpoints/step-0000001")
    code, _ = run(tmp_path, {"every": 2, "keep_last": 1})
    assert code == EXIT_DONE
    passed_over, misnamed = (event["why"] for event in events(folder) if event["event"] == "damaged_checkpoint")
    assert "step-0000006: no manifest.json" in passed_over
    assert "step-0000001: holds step 2" in misnamed
    assert steps(folder) == [1, 6]
    assert [path.name for path in catalog.damaged(folder / "checkpoints")] == ["damaged-step-0000006"]


def test_damaged_weights_to_start_from_are_refused(tmp_path):
    """`train.init_from` a checkpoint with a flipped byte: named, exit code 2, nothing trained."""
    _, folder = run(tmp_path / "first", {})
    victim = folder / "checkpoints/step-0000006/rank-00001.safetensors"
    data = bytearray(victim.read_bytes())
    data[-5] ^= 1
    victim.write_bytes(data)
    train = {"steps": 6, "device": "cpu", "init_from": str(folder)}
    code, second = run(tmp_path / "second", {}, train=train)
    assert code == EXIT_BAD_INPUT
    word = json.loads((second / "logs/error-0.json").read_text())["message"]
    assert "train.init_from" in word
    assert "rank-00001.safetensors: its checksum differs" in word
