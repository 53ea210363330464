"""A run folder is read whatever state it is in, and refused only where there is nothing to show."""

from __future__ import annotations

import json
import random
import shutil
import time
from pathlib import Path

import numpy as np
import orjson
import pytest

from megalite.errors import UserError
from megalite.report.curves import numbers_of, severity
from megalite.report.page import render
from megalite.report.run_data import read_runs
from megalite.report.sections import status
from tests.report.conftest import SECONDS_PER_STEP, START, TOKENS_PER_STEP, event, make_run, record, write_lines


def test_columns(finished):
    """Every number of every step; hours are those of the steps added up."""
    (run,) = read_runs([finished])
    assert run.name == "base"
    assert run.columns["step"].tolist() == list(range(1, 3001))
    np.testing.assert_array_equal(run.columns["tokens"], run.columns["step"] * TOKENS_PER_STEP)
    np.testing.assert_allclose(run.columns["hours"], run.columns["step"] * SECONDS_PER_STEP / 3600)
    assert (run.last_step, run.total_steps, run.problems) == (3000, 3000, ())


@pytest.mark.parametrize(
    ("kind", "key", "values"),
    [
        ("validation", "time", ["x", {}, None, -1, 1e300, float("nan"), 2**63, True]),
        ("validation", "loss", ["", [], {}]),
        ("validation", "sets", [-1, [], "x", {"valid": 1}, {"valid": {"loss": "x"}}]),
        ("validation", "tasks", [{"task": {}}, {"task": {"acc": "x"}}, ["task"]]),
        ("validation", "step", ["x", None, 1.5, -1, 2**63, ...]),
        ("start", "world_size", ["", None, 1e300]),
        ("start", "software", [1, ["torch"]]),
        ("save", "stalled_seconds", ["x", None, float("inf")]),
        ("done", "consumed", [1, {"train": 1}, {"train": {"tokens": "x"}}]),
    ],
)
def test_events_that_nobody_writes_are_left_out_and_said(tmp_path, kind, key, values):
    """A line of another type than is written, or without what it always has (...), is none of the page's."""
    written = {"validation": {"step": 5, "loss": 2.0}, "start": {"step": 0, "origin": "fresh", "world_size": 1}}
    folder = make_run(tmp_path / "run", 10, end="done")
    before = (folder / "events.jsonl").read_text()
    (whole,) = read_runs([folder])
    for value in values:
        changed = {"time": START, "event": kind, **written.get(kind, {"step": 5}), key: value}
        line = json.dumps({name: each for name, each in changed.items() if each is not ...})
        (folder / "events.jsonl").write_text(f"{before}{line}\n")
        (run,) = read_runs([folder])
        if value == []:  # as good as nothing
            continue
        assert run.problems == (*whole.problems, "events.jsonl: 1 line is no event as they are written, and left out")
        assert run.events == whole.events
        assert "What could not be read" in render([run], START)


STATISTICS = {"step": 5, "layers": {"block.0": {"grad_norm": 1.0, "kurtosis": None}}}


@pytest.mark.parametrize(
    ("name", "written", "changes"),
    [
        (
            "layers.jsonl",
            STATISTICS,
            [
                *({"step": value} for value in ("5", None, 1.5, True, ...)),
                *({"layers": value} for value in (1, {"block.0": 3}, {"block.0": {"grad_norm": "x"}})),
            ],
        ),
        (
            "plan.json",
            {"num_parameters": 10, "world_size": 1},
            [
                *({key: "many"} for key in ("num_parameters", "world_size", "total_steps", "tp")),
                *({"model": value} for value in ([1], {"vocab_size": "x"})),
                {"num_parameters": None},
            ],
        ),
        (
            "config.yaml",
            {"run": {"dir": "x"}},
            [
                *({"data": value} for value in (3, {"train": 3}, {"train": [3]}, {"train": [{"weight": "x"}]})),
                *({"batch": value} for value in ([1], {"seq_len": "x"})),
                *({"precision": value} for value in ("bf16", {"dtype": [1]})),
                {"parallel": 2},
            ],
        ),
    ],
    ids=["layers", "plan", "config"],
)
def test_files_of_other_types_are_left_out_and_said(tmp_path, name, written, changes):
    """What nobody writes there is none of the page's, which is made of the rest."""
    folder = make_run(tmp_path / "run", 10)
    (folder / name).write_text(json.dumps(written) + "\n")
    assert read_runs([folder])[0].problems == ()
    for change in changes:
        odd = {key: value for key, value in {**written, **change}.items() if value is not ...}
        (folder / name).write_text(json.dumps(odd) + "\n")
        (run,) = read_runs([folder])
        assert [problem.split(":")[0] for problem in run.problems] == [name]
        assert "What could not be read" in render([run], START)


def test_an_early_stop_without_a_step(tmp_path):
    """It is not known to be of the end."""
    folder = make_run(tmp_path / "run", 10)
    done = json.dumps(event("done", START + 60, 10))
    early = json.dumps({"time": START + 50, "event": "early_stop"})
    (folder / "events.jsonl").write_text(f"{early}\n{done}\n")
    (run,) = read_runs([folder])
    assert status(run, START) == ("finished at step 10 of 10", "good")


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


OLD_KINDS = (
    *("save started", "save failed", "batch grown", "early stop"),
    *("score alarm", "damaged checkpoint", "rate cut"),
)
"""As versions before wrote them."""


def test_kinds_of_older_runs_are_understood(tmp_path):
    """Spaces in kinds are today's underscores: the same events are loud, and an early stop is told as one."""
    folders = []
    for separator in (" ", "_"):
        folder = make_run(tmp_path / f"run{len(folders)}", 40)
        for kind in OLD_KINDS:
            spelt = json.dumps({**event(kind.replace(" ", separator), START + 80, 40), "why": "so"})
            with open(folder / "events.jsonl", "a") as file:
                print(spelt, file=file)
        folders.append(folder)
    old, new = read_runs(folders)
    assert [event["event"] for event in old.events] == [event["event"] for event in new.events]
    assert {kind.replace(" ", "_") for kind in OLD_KINDS} < {event["event"] for event in old.events}
    assert status(old, START) == status(new, START) == ("stopped early at step 40 of 40", "good")
    assert [mark["kind"] for mark in numbers_of(old)["marks"]] == [mark["kind"] for mark in numbers_of(new)["marks"]]
    assert {severity(event) for kind in ("save_failed", "damaged_checkpoint") for event in old.of_kind(kind)} == {"bad"}
    page = render([old], START)
    assert "damaged checkpoint" in page  # to people it is told in words
    assert "damaged_checkpoint" not in page


def test_columns_agree_with_a_plain_count(tmp_path):
    """Keys that come and go, steps done again, numbers no machine holds, lists, words, blank and doubled lines: what a
    loop over the lines finds."""
    generator = random.Random(0)
    lines, expected = [], {}
    for _ in range(3000):
        step = generator.randrange(1, 1500)
        told = {"step": step, "loss": generator.choice([generator.random(), None, 10**400, "3.5", True])}
        told |= {"lr": 0.1} if generator.random() < 0.5 else {"notes": [1, 2], "name": "x"}
        lines.append(json.dumps(told))
        numbers = {key: value for key, value in told.items() if isinstance(value, int | float) and value != 10**400}
        for key in told.keys() - numbers.keys():
            expected.setdefault(step, {}).pop(key, None)
        expected.setdefault(step, {}).update(numbers)
    lines[100:100] = [
        "",
        '{"step": 7, "loss": 1}{"step": 8, "loss": 2}',
        "[1]",
        '{"loss": 3}',
        '{"step": 2.5, "lr": 1}',
    ]
    folder = make_run(tmp_path / "run", 1)
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    (run,) = read_runs([folder])
    assert run.columns["step"].tolist() == sorted(expected)
    for key in ("loss", "lr"):
        plain = [expected[step].get(key, np.nan) for step in sorted(expected)]
        np.testing.assert_array_equal(run.columns[key], np.array(plain, float))
    assert run.columns.keys() == {"step", "loss", "lr", "tokens", "hours"}
    assert run.problems[0] == "metrics.jsonl: 2 lines left out, cut off or damaged"


def test_reading_costs_little_more_than_parsing(tmp_path):
    """A hundred thousand steps are read in the time of a few plain passes over the lines (it was eighteen)."""
    folder = make_run(tmp_path / "run", 10)
    write_lines(folder / "metrics.jsonl", [record(step, 1e-3) for step in range(1, 30_001)])

    def seconds(work) -> float:
        times = []
        for _ in range(3):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        return min(times)

    plain = seconds(lambda: [orjson.loads(line) for line in open(folder / "metrics.jsonl", "rb")])  # noqa: SIM115
    assert seconds(lambda: read_runs([folder])) < 8 * plain


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
