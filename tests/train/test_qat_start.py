"""Runs whose weights are rounded from some step on: what is told, what is trained, and what a restart changes."""

from __future__ import annotations

from pathlib import Path

from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.rounded_weights import rounding_of
from megalite.config.schema import Config
from megalite.data.run_config import load_run
from megalite.errors import EXIT_DONE
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
