"""`megalite verify-resume` finds equal what is equal, on every engine, and different what was changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from megalite.checkpoint.format import hash_file, read_manifest, write_manifest
from megalite.config.schema import Config
from megalite.errors import EXIT_REQUEUE, UserError
from megalite.studies.verify_resume import Report, verify_resume
from tests.kit.runs import megalite, write_run
from tests.train.forked import launch

NUM_STEPS = 2

LAYOUTS = {
    "zero0": {"tp": 1, "dp": 2, "zero_stage": 0},
    "zero1": {"tp": 1, "dp": 2, "zero_stage": 1},
    "zero2": {"tp": 1, "dp": 2, "zero_stage": 2},
    "zero3": {"tp": 1, "dp": 2, "zero_stage": 3, "engine": "deepspeed"},
    "fsdp2": {"tp": 1, "dp": 2, "zero_stage": 3, "engine": "fsdp2"},
    "tp2": {"tp": 2, "zero_stage": 1, "sequence_parallel": True},
    "pp2": {"tp": 1, "pp": 2, "zero_stage": 1},
    "pp2-tp2": {"tp": 2, "pp": 2, "zero_stage": 1},
    "pp2-zb-h1": {"tp": 1, "pp": 2, "zero_stage": 1, "schedule": "zb-h1"},
    "deepspeed": {"tp": 1, "dp": 2, "zero_stage": 1, "engine": "deepspeed"},
}


def verify(
    folder: Path, parallel: dict, between: Callable[[Path], None] | None = None, *overrides: str, steps: int = NUM_STEPS
) -> Report:
    config = write_run(folder, parallel=parallel, checkpoint={"every": 1, "keep_every": 1})
    return verify_resume(config, overrides, steps, folder, launch=launch, between=between)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_engine_resumes_exactly(tmp_path, name):
    """Metrics, weights, moments, counters and the chain over the samples, with checkpoints written in the background.

    The run's own folder is left alone.
    """
    report = verify(tmp_path, LAYOUTS[name])
    assert report.is_equal, report.findings
    assert {finding.what for finding in report.findings} >= {"loss", "weight", "exp_avg", "exp_avg_sq", "data_chain"}
    assert not (tmp_path / "run").exists()


def newest(run_dir: Path) -> Path:
    return run_dir / "checkpoints" / f"step-{NUM_STEPS:07d}"


def change_a_moment(run_dir: Path) -> None:
    """One number of one moment, by the smallest step there is; the checksums are made to fit."""
    folder = newest(run_dir)
    manifest = read_manifest(folder)
    name = "exp_avg_sq/final_norm.weight"
    (piece,) = manifest.tensors[name].pieces
    tensors = load_file(folder / piece.file)
    tensors[piece.key][0] = torch.nextafter(tensors[piece.key][0], torch.tensor(1.0))
    save_file(tensors, folder / piece.file, metadata={"format": "pt"})
    manifest.files[piece.file] = hash_file(folder / piece.file)
    write_manifest(folder, manifest)


def skip_a_batch(run_dir: Path) -> None:
    """The chain says that other samples were consumed."""
    manifest = read_manifest(newest(run_dir))
    manifest.progress = replace(manifest.progress, data_chain="00" * 16)
    write_manifest(newest(run_dir), manifest)


def forget_an_update(run_dir: Path) -> None:
    """The optimizer's counter is one behind, so its bias correction differs."""
    manifest = read_manifest(newest(run_dir))
    manifest.progress = replace(manifest.progress, num_updates=NUM_STEPS - 1)
    write_manifest(newest(run_dir), manifest)


@pytest.mark.parametrize(
    ("plant", "what"),
    [
        (change_a_moment, {"exp_avg_sq"}),
        (skip_a_batch, {"data_chain"}),
        (forget_an_update, {"num_updates", "weight"}),
    ],
)
def test_planted_differences_are_found(tmp_path, plant, what):
    """A last bit of one moment, a foreign chain, a counter: each is found and named."""
    report = verify(tmp_path, {"tp": 1, "zero_stage": 1}, plant)
    differing = {finding.what for finding in report.findings if finding.until_restart or finding.after_restart}
    assert what <= differing, report.findings
    assert not report.is_equal


def test_a_run_that_is_too_short(tmp_path):
    """Three steps cannot be cut into two and two."""
    with pytest.raises(UserError, match=r"the run has 6 steps, fewer than 2 x 4; use --steps 3"):
        verify(tmp_path, {"tp": 1, "zero_stage": 1}, steps=4)


@pytest.mark.parametrize("name", ["a #1", "a: b"])
def test_a_folder_with_a_name_that_yaml_reads_otherwise(tmp_path, name):
    """Both runs are in it: cut at a comment's sign, one went on in the other's."""
    folders = []

    def note(config: Config, world_size: int, **options) -> int:
        folders.append(config.run.dir)
        if len(folders) == 2:
            raise UserError("enough")
        return EXIT_REQUEUE

    with pytest.raises(UserError, match="enough"):
        verify_resume(write_run(tmp_path, parallel={"tp": 1}), (), 2, tmp_path / name, launch=note)
    assert folders == [tmp_path / name / each for each in ("whole", "halves")]


def test_a_run_that_may_stop_early(tmp_path):
    """Both runs go to their ends."""
    config = write_run(
        tmp_path,
        parallel={"tp": 1, "zero_stage": 1},
        train={"eval_every": 1, "early_stopping": {"patience": 1, "min_delta": 9.0}},
    )
    assert verify_resume(config, (), 2, tmp_path, launch=launch).is_equal


def test_a_checkpoint_between_the_two(tmp_path):
    """The one before the final decay, which is saved besides, does not push that of step N out."""
    schedule = ("schedule.name=wsd", "schedule.warmup_steps=1", "schedule.decay_steps=3")
    assert verify(tmp_path, {"tp": 1, "zero_stage": 1}, None, *schedule, "checkpoint.keep_every=null").is_equal


def test_command(tmp_path):
    """The table, the verdict and the exit code, on real processes; and a mistake in the config is exit code 2."""
    config = write_run(tmp_path, parallel={"tp": 1, "zero_stage": 1})
    done = megalite("verify-resume", config, "--steps", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "data_chain" in done.stdout
    assert "exact: 2 steps, and 1 + restart + 1, are equal to the last bit" in done.stdout
    wrong = yaml.safe_load(config.read_text())
    wrong["model"]["num_heads"] = 5
    config.write_text(yaml.safe_dump(wrong))
    done = megalite("verify-resume", config)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
