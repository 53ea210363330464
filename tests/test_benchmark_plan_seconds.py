"""The benchmark of the planner's seconds compares within one pace of the machine alone."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.kit.paths import ROOT

TOOLS = ROOT / "tools" / "benchmarks"
NAMES = ["one", "one all recomputed", "one selective"]


def runs_of(paces: list[float], monkeypatch: pytest.MonkeyPatch) -> tuple[list[tuple[str, bool]], int]:
    """Cases and whether they are steady, and how often was calibrated, when the machine has these paces in turn."""
    monkeypatch.syspath_prepend(str(TOOLS))
    module = runpy.run_path(str(TOOLS / "plan_seconds.py"))
    for name in ("arguments", "pace"):  # other benchmarks import theirs by bare names too
        del sys.modules[name]
    left, calibrated = iter(paces), []
    inside = module["runs_of"].__globals__
    moment = inside["Moment"]
    inside |= {
        "Moment": lambda: moment(lambda: next(left)),
        "calibrate": lambda *_: calibrated.append(1),
        "load_machine": lambda _: None,
        "train": lambda *_: (1.0, 2),
        "plan_of": lambda *_: SimpleNamespace(seconds=1.0),
    }
    kind = inside["CASES"][NAMES[0]].kind
    found = [(name, run.steady) for name, run in inside["runs_of"](kind, NAMES, Path())]
    assert next(left, None) is None, "another number of looks at the pace"
    return found, len(calibrated)


def test_a_steady_machine_is_calibrated_once(monkeypatch):
    found, calibrated = runs_of([1.0, 1.04, 0.93, 1.0, 1.07], monkeypatch)
    assert (found, calibrated) == ([(name, True) for name in NAMES], 1)


def test_a_run_in_another_pace_does_not_count(monkeypatch):
    """It is run again behind another calibration, and so is the calibration that saw two paces itself."""
    found, calibrated = runs_of([1.0, 1.0, 1.0, 1.2, 1.2, 1.5, 1.5, 1.5, 1.5, 1.5], monkeypatch)
    assert (found, calibrated) == ([(name, True) for name in NAMES], 3)


def test_a_machine_that_never_keeps_its_pace_is_said_to(monkeypatch):
    found, calibrated = runs_of([1.0, 1.2] * 3 + [1.0, 1.2, 1.2, 1.0, 1.2], monkeypatch)
    assert (found, calibrated) == ([(NAMES[0], False), (NAMES[1], True), (NAMES[2], False)], 4)
