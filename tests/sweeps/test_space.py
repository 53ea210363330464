"""What a sweep tries: grids against brute force, ranges, and everything wrong by name."""

from __future__ import annotations

import itertools
import math

import pytest

from megalite.config.load import load_config
from megalite.errors import ConfigError
from megalite.sweeps.settings import SweepConfig, load_sweep
from megalite.sweeps.space import Dimension, ValueRange, corners, grid, overrides_of, read_dimension
from megalite.sweeps.suggest import Suggestions
from tests.kit.paths import ROOT

DEBUG = ROOT / "configs" / "debug.yaml"


def complaints(**settings) -> str:
    with pytest.raises(ConfigError) as refused:
        load_sweep(DEBUG, (), ["optimizer.lr=[1e-3]"], {"dir": "x", **settings})
    return str(refused.value)


def refusal(over: str, **settings) -> str:
    with pytest.raises(ConfigError) as refused:
        load_sweep(DEBUG, (), [over], {"dir": "x", **settings})
    return str(refused.value)


def test_a_grid_is_the_product():
    """Every combination once, with the numbers that logarithms and steps give."""
    lr = Dimension("optimizer.lr", span=ValueRange(1e-4, 1e-2, log=True, points=3))
    layers = Dimension("model.num_layers", span=ValueRange(2, 8, step=3))
    tied = Dimension("model.tie_embeddings", choices=(True, False))
    found = grid([lr, layers, tied])
    expected = itertools.product((1e-4, 1e-3, 1e-2), (2, 5, 8), (True, False))
    assert [tuple(point.values()) for point in found] == list(expected)
    assert all(type(point["model.num_layers"]) is int for point in found)
    assert ValueRange(1, 5, points=9).grid() == (1, 2, 3, 4, 5)  # whole numbers, each once


@pytest.mark.parametrize(
    ("span", "expected"),
    [
        (ValueRange(0, 1, step=0.25), (0.0, 0.25, 0.5, 0.75, 1.0)),
        (ValueRange(4, 17, step=0.25), tuple(4 + number / 4 for number in range(53))),
        (ValueRange(0, 6, step=2), (0, 2, 4, 6)),
        (ValueRange(0.0169, 0.0169669, points=9), tuple(0.0169 + 0.0000669 * number / 8 for number in range(9))),
        (ValueRange(1.0, 1.0001, step=1e-5), tuple(1 + number * 1e-5 for number in range(11))),
        (ValueRange(1e-4, 1.001e-4, log=True, points=3), (1e-4, 1e-4 * 1.001**0.5, 1.001e-4)),
    ],
)
def test_no_point_of_a_range_is_lost(span, expected):
    """Where a step divides whole numbers, or points lie closer than four digits tell."""
    assert span.grid() == pytest.approx(expected, rel=1e-5)
    assert len(set(span.grid())) == len(expected)


def test_a_key_in_two_dimensions():
    """A trial would have one of its values, and the table would name both."""
    with pytest.raises(ConfigError, match=r"optimizer\.lr is in 2 of its dimensions"):
        load_sweep(DEBUG, (), ["optimizer.lr=[1e-3, 1e-2]", "group=[{optimizer.lr: 2e-3}]"], {"dir": "x"})


def test_values_go_through_yaml(tmp_path):
    """Floats, lists, null, mappings and groups of keys are what they were when a config has read them."""
    point = {
        "optimizer.lr": 1e-05,
        "optimizer.betas": [0.8, 0.99],
        "model.mup": None,
        "shape": {"model.hidden_size": 32, "model.rope": {"theta": 500.0}},
        "monitor.wandb.project": "a #1: \U0001f642 {é",
    }
    config = load_config(DEBUG, overrides_of(point))
    assert (config.optimizer.lr, config.optimizer.betas, config.model.mup) == (1e-5, (0.8, 0.99), None)
    assert (config.model.hidden_size, config.model.rope.theta) == (32, 500.0)
    assert config.monitor.wandb.project == point["monitor.wandb.project"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "an empty list"),
        ([1, 1], "there twice"),
        ({"low": 2, "high": 1}, "an empty range: low=2 is not below high=1"),
        ({"low": 0, "high": 1, "log": True}, "log=true needs numbers above 0"),
        ({"low": 0, "hgh": 1}, "hgh: no key of a range (did you mean 'high'?)"),
        ({"low": 0, "high": math.inf}, "expected a finite number"),
        ({"low": 0, "high": 1, "points": 0}, "points: found 0"),
        ({"low": 0, "high": 1, "points": True}, "points: found True"),
        ({"low": 0, "high": 1, "step": -1}, "step: found -1"),
        ({"low": 1, "high": 2, "step": 1, "points": 2}, "step: found beside points"),
        ({"low": 1, "high": 2, "log": "yes"}, "log: found 'yes'"),
        ({"low": 0, "high": 1, "points": 5}, "points: 5, of 2 whole numbers; write low: 0.0"),
        (3, "found 3, expected a list of values, or a range"),
        ([{"a.b": 1}], "expected a value of optimizer.lr"),
    ],
)
def test_what_is_wrong_with_a_dimension(given, said):
    """Each in words, with what was found."""
    dimension, found = read_dimension("optimizer.lr", given)
    assert dimension is None
    assert any(said in each for each in found), found


def test_what_is_wrong_with_a_group():
    """Its values name the same keys."""
    for given, said in (
        ([{"a.b": 1}, {"a.c": 2}], "name different keys"),
        ([1], "a name without a dot is a group"),
        ([{}], "a mapping without keys"),
        ({"low": 1, "high": 2}, "has a list of mappings and no range"),
    ):
        assert any(said in each for each in read_dimension("shape", given)[1])


def test_what_is_wrong_with_a_sweep():
    """Of the file or the command line: sizes of grids, and settings that have no effect."""
    assert "trials: 3 has no effect with method=grid" in complaints(trials=3)
    assert "trials: null, but method=random" in complaints(method="random")
    assert "halving: found beside method=tpe" in complaints(method="tpe", trials=2, halving={"min_steps": 1})
    assert "did you mean" in complaints(metod="grid")
    assert "add points=5, or step" in refusal("optimizer.lr={low: 1e-4, high: 1}")
    assert "1,000,000,000 points; at most 10,000" in refusal("optimizer.lr={low: 0, high: 1, step: 1e-9}")
    assert "100,000 points; at most 10,000" in refusal("optimizer.lr={low: 0.1, high: 1, points: 100000}")
    assert "points: 2 has no effect with method=random" in refusal(
        "optimizer.lr={low: 0.1, high: 1, points: 2}", method="random", trials=1
    )
    assert "write KEY=VALUES" in refusal("optimizer.lr")
    with pytest.raises(ConfigError, match="names nothing to vary"):
        load_sweep(DEBUG, (), [], {})


def test_a_file_and_the_command_line(tmp_path):
    """Options replace what the file says; `--over` adds a dimension."""
    path = tmp_path / "sweep.yaml"
    path.write_text(f"config: {DEBUG}\ndir: here\nspace: {{optimizer.lr: [1e-3, 1e-2]}}\nseed: 4\n")
    found = load_sweep(path, ["train.steps=5"], ["run.seed=[1, 2]"], {"seed": 7, "metric": None})
    assert (found.seed, found.metric, found.overrides) == (7, "validation", ("train.steps=5",))
    assert len(grid(found.dimensions())) == 4


def test_corners_meet_every_value():
    """Of lists all values, of ranges both ends, one at a time."""
    found = corners([Dimension("a.b", choices=(1, 2, 3)), Dimension("c.d", span=ValueRange(0.0, 1.0))])
    assert [tuple(each.values()) for each in found] == [(1, 0.0), (2, 0.0), (3, 0.0), (1, 1.0)]


SPACE = (
    Dimension("optimizer.lr", span=ValueRange(1e-4, 1e-1, log=True)),
    Dimension("model.num_layers", span=ValueRange(1, 9, step=2)),
    Dimension("group", choices=({"a.b": 1, "a.c": 1}, {"a.b": 2, "a.c": 3})),
)


@pytest.mark.parametrize("method", ["random", "tpe"])
def test_draws_are_functions_of_seed_and_number(method):
    """The same again in another process or after a restart, whatever was drawn between; and all within the space."""
    one, other = Suggestions(SPACE, method, 3, "min"), Suggestions(SPACE, method, 3, "min")
    later = other.draw(5, ())
    points = [one.draw(number, ()) for number in range(1, 6)]
    assert points[4] == later
    assert len({str(point) for point in points}) == 5
    for point in points:
        assert 1e-4 <= point["optimizer.lr"] <= 1e-1
        assert point["model.num_layers"] in (1, 3, 5, 7, 9)
        assert point["group"] in SPACE[2].choices
    assert Suggestions(SPACE, method, 4, "min").draw(5, ()) != later


@pytest.mark.parametrize("goal", ["min", "max"])
def test_tpe_goes_where_it_was_good(goal):
    """On a bowl over log(rate) it comes nearer to the bottom than random draws do."""
    sign = 1.0 if goal == "min" else -1.0

    def value(point) -> float:
        return sign * (math.log10(point["optimizer.lr"]) + 2.5) ** 2

    def last_ten(method: str) -> float:
        suggestions, seen = Suggestions(SPACE[:1], method, 0, goal), []
        for number in range(1, 41):
            point = suggestions.draw(number, seen)
            seen.append((point, value(point)))
        return sum(sign * each for _, each in seen[-10:]) / 10

    assert last_ten("tpe") < 0.5 * last_ten("random")


def test_without_optuna(monkeypatch):
    """The message names the extra; a grid needs none."""
    import sys

    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ValueError, match=r"pip install 'megalite\[sweep\]', or use method=grid"):
        Suggestions(SPACE, "random", 0, "min")
    assert SweepConfig(config=DEBUG, dir="x", space={"optimizer.lr": [1]}).method == "grid"
