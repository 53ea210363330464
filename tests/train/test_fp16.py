"""A whole run in fp16: overflows are events, the scale is a curve, and a restart repeats it to the last bit."""

from __future__ import annotations

from pathlib import Path

from megalite.config.load import load_config
from megalite.config.schema import Config
from megalite.engine import runtime
from megalite.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_REQUEUE
from megalite.train.loop import TrainingLoop
from tests.engine.test_fp16 import LARGE, allow_fp16
from tests.kit.runs import events, metrics, write_run
from tests.train.forked import launch

STEPS = 16


def begin_too_large() -> None:
    """On every rank: fp16 is allowed, and a new run begins with a scale that overflows."""
    allow_fp16()
    train = TrainingLoop.train

    def with_large_scale(self: TrainingLoop) -> int:
        engine = self.run.engine
        if self.progress.step == 0:
            engine.set_loss_scaling({**engine.loss_scaling(), "scale": LARGE})
        return train(self)

    TrainingLoop.train = with_large_scale


def config_of(folder: Path) -> Config:
    sections = {
        "parallel": {"tp": 1, "dp": 2, "zero_stage": 2},
        "precision": {"dtype": "fp16"},
        "train": {"steps": STEPS, "device": "auto"},
    }
    return load_config(write_run(folder, **sections))


def test_overflows_and_a_restart(tmp_path):
    """A run that is stopped between two overflows has the losses, scales and skips of one in a single go."""
    whole, parts = config_of(tmp_path / "whole"), config_of(tmp_path / "parts")
    assert launch(whole, 2, prepare=begin_too_large) == EXIT_DONE
    assert launch(parts, 2, stop_after=3, prepare=begin_too_large) == EXIT_REQUEUE
    assert launch(parts, 2, prepare=begin_too_large) == EXIT_DONE
    curve, again = (
        [(record["loss"], record["grad_norm"], record["loss_scale"], record["skipped"]) for record in metrics(folder)]
        for folder in (whole.run.dir, parts.run.dir)
    )
    assert repr(again) == repr(curve)  # infinite norms are NaN or null
    skips = [event for event in events(whole.run.dir) if event["event"] == "skip"]
    assert len(skips) == sum(skipped for *_, skipped in curve) >= 3
    assert all("gradient norm" in event["why"] for event in skips)
    scales = [scale for _, _, scale, _ in curve]
    assert scales[0] == LARGE
    assert scales[-1] == LARGE / 2 ** (len(skips) - 1)
    assert not curve[-1][-1]


def refuse_fp16() -> None:
    """A CPU without units for fp16."""
    runtime.has_fp16 = lambda device_type: False


def test_a_cpu_without_fp16(tmp_path):
    """Exit code 2 and what to set, where only the rank can know."""
    config = config_of(tmp_path)
    assert launch(config, 2, prepare=refuse_fp16) == EXIT_BAD_INPUT
    said = "".join(path.read_text() for path in (config.run.dir / "logs").rglob("*") if path.is_file())
    assert "set precision.dtype=bf16" in said
