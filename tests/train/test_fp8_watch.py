"""A run in FP8 watches itself: what it writes down, on every layout, and how layers go back to bf16 for good."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megalite.checkpoint.reader import CheckpointReader
from megalite.config.load import load_config
from megalite.engine.native.engine import NativeEngine
from megalite.engine.protocol import StepResult
from megalite.studies.verify_resume import verify_resume
from tests.kit.runs import write_run
from tests.train.forked import launch

NUM_LAYERS = 2 * 4
SETTINGS = "backend: emulate, recipe: delayed, amax_history_len: 4, watch_every: 2, fallback_error: 0.03"
"""Less than FP8 costs any layer, so that all go back at the second look."""
LAYOUT_TOLERANCE = 1e-3
"""Relative, of a layer's error: the order of sums moves a rounding now and then."""


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def train(folder: Path, *overrides: str, prepare: Callable[[], None] | None = None) -> Path:
    """Train six steps and return the run's folder. `prepare` is called on every rank first."""
    settings = [f"precision.fp8={{{SETTINGS}}}", "checkpoint.every=4", "monitor.tensorboard=false", *overrides]
    config = load_config(write_run(folder), settings)
    assert launch(config, config.parallel.tp * config.parallel.pp, prepare=prepare) == 0
    return config.run.dir


LAYOUTS = {"tp": ["parallel.tp=2"], "pp": ["parallel.tp=1", "parallel.pp=2"]}


@pytest.fixture(scope="module", params=list(LAYOUTS))
def run(request, tmp_path_factory) -> Path:
    """A run on two ranks, of each kind."""
    return train(tmp_path_factory.mktemp(f"fp8-{request.param}"), *LAYOUTS[request.param])


def test_every_layer_is_looked_at(run):
    """`fp8.jsonl` has a line a look with the shadow's error, and every layer of all stages as long as it is in FP8."""
    looks = lines(run / "fp8.jsonl")
    assert [look["step"] for look in looks] == [2, 4, 6]
    assert [len(look["layers"]) for look in looks] == [NUM_LAYERS, NUM_LAYERS, 0]
    for look in looks[:2]:
        assert 0 < look["shadow"]["error"] < 0.01
        for layer in look["layers"].values():
            assert 0.02 < layer["error"] < 0.1
            assert set(layer) == {"error", "activation", "weight", "gradient"}
            assert all(layer[role]["amax"] > 0 and layer[role]["error"] < 0.1 for role in list(layer)[1:])
    assert looks[2]["shadow"]["error"] == 0


def test_looks_of_other_kinds_do_not_count(run, tmp_path):
    """A look into the layers in the same step, which runs the model forward once more, changes nothing that is seen."""
    kind = next(kind for kind in LAYOUTS if run.parent.name.startswith(f"fp8-{kind}"))
    beside = train(tmp_path, *LAYOUTS[kind], "monitor.layers_every=2")
    assert len(lines(beside / "layers.jsonl")) == 3
    assert lines(beside / "fp8.jsonl") == lines(run / "fp8.jsonl")


def test_layers_that_go_back_are_events_and_are_kept(run):
    """All ranks gave up the same layers at step 4; the events say why, and the checkpoint of that step knows them."""
    gone = [event for event in lines(run / "events.jsonl") if event["event"] == "fp8_given_up"]
    assert [event["step"] for event in gone] == [4] * NUM_LAYERS
    assert all("allowed is 0.03" in event["why"] for event in gone)
    reader = CheckpointReader(run / "checkpoints" / "step-0000004")
    kept = {name: next(iter(reader.slabs(name))).item() for name in reader.manifest.tensors if "fp8_retired/" in name}
    assert kept == {f"fp8_retired/{event['layer']}": 4.0 for event in gone}


def leave_out_step_four() -> None:
    """On every rank: the fourth step says that it was skipped."""
    train_step, steps = NativeEngine.train_step, itertools.count(1)

    def step(self: NativeEngine, *args: Any) -> StepResult:
        return replace(train_step(self, *args), skipped=next(steps) == 4)

    NativeEngine.train_step = step


def test_a_step_that_was_left_out_says_nothing_of_layers(tmp_path):
    """Its look is written down, but layers go back at the next one: a gradient of NaN is not FP8's doing."""
    folder = train(tmp_path, "parallel.tp=1", prepare=leave_out_step_four)
    assert [len(look["layers"]) for look in lines(folder / "fp8.jsonl")] == [NUM_LAYERS] * 3
    gone = [event for event in lines(folder / "events.jsonl") if event["event"] == "fp8_given_up"]
    assert [event["step"] for event in gone] == [6] * NUM_LAYERS


def test_layouts_see_the_same(tmp_path):
    """What two ranks measure, cut by tp, is what one rank measures."""
    one, two = (lines(train(tmp_path / f"tp{tp}", f"parallel.tp={tp}") / "fp8.jsonl")[0] for tp in (1, 2))
    assert one["layers"].keys() == two["layers"].keys()
    for name, layer in one["layers"].items():
        for role in ("activation", "weight", "gradient"):
            for key in ("amax", "error"):
                assert two["layers"][name][role][key] == pytest.approx(layer[role][key], rel=LAYOUT_TOLERANCE)


def test_runs_resume_exactly(tmp_path):
    """`verify-resume` finds no difference, maxima and layers that went back included: the run that is stopped after
    the first of the two looks gives up the same layers."""
    overrides = [f"precision.fp8={{{SETTINGS}}}", "parallel.tp=1"]
    report = verify_resume(write_run(tmp_path / "config"), overrides, 3, tmp_path / "runs", launch=launch)
    findings = {finding.what: (finding.until_restart, finding.after_restart) for finding in report.findings}
    assert {"weight", "fp8_amax", "fp8_retired"} <= findings.keys()
    assert set(findings.values()) == {("", "")}, findings
