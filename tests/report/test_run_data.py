"""A run folder is read whatever state it is in, and refused only where there is nothing to show."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from megalite.errors import UserError
from megalite.report.page import render
from megalite.report.run_data import read_runs
from tests.report.conftest import SECONDS_PER_STEP, START, TOKENS_PER_STEP, make_run, record


def test_columns(finished):
    """Every number of every step; hours are those of the steps added up."""
    (run,) = read_runs([finished])
    assert run.name == "base"
    assert run.columns["step"].tolist() == list(range(1, 3001))
    np.testing.assert_array_equal(run.columns["tokens"], run.columns["step"] * TOKENS_PER_STEP)
    np.testing.assert_allclose(run.columns["hours"], run.columns["step"] * SECONDS_PER_STEP / 3600)
    assert (run.last_step, run.total_steps, run.problems) == (3000, 3000, ())


def test_broken_run(tmp_path):
    """Cut-off lines, NaN, steps done twice, no config, no plan, no events: all of it is said, and the page is made."""
    folder = make_run(tmp_path / "run", 40, end=None)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({**record(39, 1e-3), "loss": 1.5}) + "\n")
        file.write('{"step": 41, "loss": NaN, "lr": 1e-3}\n{"step": 42, "lo')
    (folder / "events.jsonl").write_text((folder / "events.jsonl").read_text() + '{"time": 3, "ev')
    (run,) = read_runs([folder])
    assert run.last_step == 41
    assert run.columns["loss"][38] == 1.5
    assert np.isnan(run.columns["loss"][-1])
    assert run.problems == (
        "metrics.jsonl: 1 line left out, cut off or damaged",
        "events.jsonl: 1 line left out, cut off or damaged",
    )
    assert "What could not be read" in render([run], START)
    (folder / "config.yaml").write_text("run: [")
    (folder / "plan.json").unlink()
    (folder / "events.jsonl").unlink()
    (run,) = read_runs([folder])
    assert [problem.split(":")[0] for problem in run.problems] == [
        "metrics.jsonl",
        "events.jsonl",
        "config.yaml",
        "plan.json",
    ]
    assert "plan.json: not there" in render([run], START)


def test_names_tell_runs_apart(tmp_path):
    """Runs whose folders have one name are called by what differs; the same run twice is numbered."""
    a = make_run(tmp_path / "a" / "run", 3)
    b = tmp_path / "b" / "run"
    shutil.copytree(a, b)
    assert [run.name for run in read_runs([a, b])] == ["a/run", "b/run"]
    assert [run.name for run in read_runs([a, a])] == ["run", "run (2)"]


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        (None, "no such folder; give the folder that run.dir names"),
        ({}, "not a run's folder"),
        ({"config.yaml": ""}, "no metrics.jsonl yet; wait for its first step"),
        ({"metrics.jsonl": ""}, "holds no step yet; wait for the run's first step, or look into logs/"),
        ({"metrics.jsonl": '{"ste'}, "holds no step yet"),
        ({"one/metrics.jsonl": ""}, "there are runs in it: one"),
    ],
    ids=str,
)
def test_refused(tmp_path: Path, files: dict[str, str] | None, complaint: str):
    """Each with what to do."""
    folder = tmp_path / "run"
    for name, text in (files or {}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    if files == {}:
        folder.mkdir()
    with pytest.raises(UserError, match=complaint):
        read_runs([folder])
