"""Runs whose weights are rounded from some step on: what is told, what is trained, and what a restart changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megalite.architecture.weights import weight_table
from megalite.checkpoint.format import stored_model
from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.rounded_weights import computing_weights, rounding_of
from megalite.config.schema import Config
from megalite.data.run_config import load_run
from megalite.errors import EXIT_DONE, ConfigError
from megalite.model.initialize import WeightSource
from tests.kit.runs import events, metrics, write_run
from tests.train.forked import launch

START, STEPS = 3, 4


def config_of(folder: Path, name: str, *overrides: str) -> Config:
    base = write_run(folder, parallel={"tp": 1, "zero_stage": 1}, train={"steps": STEPS, "eval_every": 2})
    return load_run(base, [f"run.dir={folder / name}", "checkpoint.every=2", *overrides])


def seen(config: Config) -> list[float]:
    """Losses of the steps, then those of validation."""
    valid = [event["loss"] for event in events(config.run.dir) if event["event"] == "validation"]
    return [*(record["loss"] for record in metrics(config.run.dir)), *valid]


def test_rounding_begins_at_its_step(tmp_path: Path):
    """Steps and validation before it are those of a plain run, bit by bit, those after it are not; an event says when;
    checkpoints are exported rounded from then on alone; a run that was stopped before it goes on as if it was not."""
    qat = f"precision.qat={{bits: 4, group_size: 32, start_step: {START}}}"
    plain, whole, halves = config_of(tmp_path, "plain"), config_of(tmp_path, "a", qat), config_of(tmp_path, "b", qat)
    assert launch(plain, 1) == launch(whole, 1) == EXIT_DONE
    launch(halves, 1, stop_after=START - 1)
    assert launch(halves, 1) == EXIT_DONE
    one, other = seen(plain), seen(whole)
    assert len(one) == len(other) == STEPS + 2
    equal = [left == right for left, right in zip(one, other, strict=True)]
    assert equal == [True, True, False, False, True, False]
    assert seen(halves) == other
    for config in (whole, halves):
        assert [event["step"] for event in events(config.run.dir) if event["event"] == "qat_begins"] == [START]
        folders = [config.run.dir / "checkpoints" / f"step-{step:07d}" for step in (2, STEPS)]
        assert [rounding_of(CheckpointReader(folder)) is not None for folder in folders] == [False, True]


def read(run: Path, name: str, weights: Callable[[CheckpointReader], WeightSource] | None = None) -> Tensor:
    """A weight of a run's last checkpoint, as it is trained or as others see it."""
    reader = CheckpointReader(run / "checkpoints" / f"step-{STEPS:07d}")
    row = weight_table(stored_model(reader.folder, reader.manifest))[name]
    source = reader.source("weight") if weights is None else weights(reader)
    return source.read(row, row.local(1, 0))


def test_scales_are_trained_from_the_weights_that_a_run_begins_with(tmp_path: Path):
    """A run begins with another's weights and the scales that follow from them, goes on bit by bit after a stop, and
    moves them; another one goes on with both. Whoever evaluates computes with numbers of the grid. Other scales than
    those that were trained are refused by name."""
    qat = "precision.qat={bits: 4, group_size: 32, learned_scales: true}"
    plain, still = config_of(tmp_path, "plain"), (qat, "optimizer.lr=1e-30", "optimizer.weight_decay=0")
    assert launch(plain, 1) == EXIT_DONE
    begun = config_of(tmp_path, "begun", f"train.init_from={plain.run.dir}", *still)
    learned, halves = (config_of(tmp_path, name, f"train.init_from={begun.run.dir}", qat) for name in ("a", "b"))
    assert launch(begun, 1) == launch(learned, 1) == EXIT_DONE
    launch(halves, 1, stop_after=2)
    assert launch(halves, 1) == EXIT_DONE
    assert seen(halves) == seen(learned)

    name = "blocks.1.mlp.down.weight"
    weight, first, moved = (
        read(run.run.dir, each) for run, each in ((begun, name), (begun, f"{name}_scale"), (learned, f"{name}_scale"))
    )
    torch.testing.assert_close(first, weight.abs().unflatten(1, (-1, 32)).mean(2) * 2 / 7**0.5)
    assert 1e-6 < (moved / first - 1).abs().max() < 0.5
    groups = read(learned.run.dir, name, computing_weights).unflatten(1, (-1, 32)) / moved.unsqueeze(2)
    torch.testing.assert_close(groups, groups.round(), rtol=0.0, atol=1e-4)
    assert set(range(-6, 7)) <= set(groups.round().int().unique().tolist()) <= set(range(-7, 8))

    for override, now in ((("precision.qat.bits=8",), "scales of 8-bit"), (("precision.qat=null",), "no scales")):
        with pytest.raises(ConfigError, match=rf"precision.qat: scales of 4-bit groups of 32 .*, {now}"):
            launch(config_of(tmp_path, "a", qat, *override, f"train.steps={STEPS + 1}"), 1)
    trunk = f"train.branch_from={begun.run.dir}/checkpoints/step-{STEPS:07d}"
    branch = config_of(tmp_path, "branch", trunk, f"train.steps={STEPS + 1}")
    assert launch(branch, 1) != EXIT_DONE
    said = "".join(path.read_text() for path in (branch.run.dir / "logs").rglob("*") if path.is_file())
    assert "4-bit groups of 32 that are trained" in said
    assert "no scales that are trained now" in said
