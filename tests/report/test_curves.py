"""Curves keep what matters when there are more steps than points, and charts follow from what runs have."""

from __future__ import annotations

import json

import numpy as np
import pytest

from megalite.report.curves import MAX_POINTS, charts_of, numbers_of
from megalite.report.run_data import read_runs, time_use
from tests.report.conftest import SECONDS_PER_STEP, make_run, write_lines

DIGITS = 1e-5
"""Relative: six digits are kept."""


def test_thinning_keeps_means_and_spikes(finished):
    """Each point is the mean of its stretch of steps, stretches tile the run, and the spike is in the band."""
    (run,) = read_runs([finished])
    found = numbers_of(run)
    ends = np.array(found["x"]["step"], int)
    assert len(ends) == MAX_POINTS
    assert ends[-1] == 3000
    stretches = np.split(run.columns["loss"], ends[:-1])
    for name, of in (("y", np.mean), ("low", np.min), ("high", np.max)):
        np.testing.assert_allclose(found["series"]["loss"][name], [of(each) for each in stretches], rtol=DIGITS)
    assert max(found["series"]["loss"]["high"][20:]) == pytest.approx(10 / 150**0.5 + 5, rel=DIGITS)
    json.dumps(found, allow_nan=False)


def test_short_runs_are_not_thinned(tmp_path):
    """Every step is a point of its own, without a band."""
    (run,) = read_runs([make_run(tmp_path / "run", 7, end=None)])
    found = numbers_of(run)
    assert found["x"]["step"] == [1, 2, 3, 4, 5, 6, 7]
    assert "low" not in found["series"]["loss"]
    np.testing.assert_allclose(found["series"]["loss"]["y"], run.columns["loss"], rtol=DIGITS)


def test_validations_and_marks_lie_where_they_happened(finished):
    """On every x axis; only what is out of the ordinary is marked."""
    (run,) = read_runs([finished])
    found = numbers_of(run)
    prose = found["points"]["valid/prose"]
    assert prose["step"] == list(range(100, 3001, 100))
    assert prose["y"][0] == pytest.approx(1.1)
    np.testing.assert_allclose(prose["hours"], np.array(prose["step"]) * SECONDS_PER_STEP / 3600, rtol=DIGITS)
    assert [(mark["step"], mark["kind"]) for mark in found["marks"]] == [(150, "warn")]


def test_colours(finished, tmp_path):
    """One run has a colour for each line; several have one each, and a dash for each validation set."""
    (run,) = read_runs([finished])
    (loss, *others) = charts_of([run])
    assert [(line.label, line.color, line.dash) for line in loss.lines] == [
        ("training", 0, 0),
        ("validation: prose", 1, 0),
        ("validation: code", 2, 0),
    ]
    titles = [chart.title for chart in others]
    assert {"Learning rate", "Throughput", "Peak memory of the first rank"} <= set(titles)
    runs = read_runs([finished, make_run(tmp_path / "other", 100, sets=("prose",))])
    lines = charts_of(runs)[0].lines
    assert [(line.run, line.color, line.dash) for line in lines] == [
        (0, 0, 0),
        (0, 0, 1),
        (0, 0, 2),
        (1, 1, 0),
        (1, 1, 1),
    ]


def test_where_the_time_went(finished):
    """Steps, validations and saves as they were made; the ten minutes of the restart are what is left."""
    used = time_use(read_runs([finished])[0])
    assert used.steps == pytest.approx(3000 * SECONDS_PER_STEP)
    assert used.validating == pytest.approx(30 * 4.0)
    assert used.saving == pytest.approx(30 * 1.0)
    assert used.other == pytest.approx(600.0)
    assert used.goodput == pytest.approx(6000 / 6750)


def test_layers(tmp_path):
    """Each statistic of a look into the layers has a chart, with some of many layers, the first and the last among
    them; broken looks are left out."""
    folder = make_run(tmp_path / "run", 40)
    layers = {f"blocks.{n}": {"rms": 1.0 + n, "grad_norm": 0.1} for n in range(20)}
    looks = [{"step": step, "weights": {}, "layers": layers} for step in (10, 20, 30)]
    write_lines(folder / "layers.jsonl", [*looks, {"step": 40}])
    (run,) = read_runs([folder])
    charts = {chart.title: chart for chart in charts_of([run])}
    lines = charts["Layers: rms"].lines
    assert (len(lines), lines[0].label, lines[-1].label) == (6, "blocks.0", "blocks.19")
    assert charts["Layers: grad norm"].log
    assert numbers_of(run)["points"]["layer/rms/blocks.19"]["y"] == [20.0] * 3
