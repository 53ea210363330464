"""Ladders: shapes by the rule, budgets against brute force, and whole ladders on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from megalite.cli.main import app
from megalite.config.load import load_config
from megalite.config.plan import make_plan
from megalite.errors import ConfigError, UserError
from megalite.ladder.budget import best_for_flops, best_for_hours, far_off
from megalite.ladder.ladder import Plan, foretell, read_target, runs_of
from megalite.ladder.law import fit_law
from megalite.ladder.page import budget_plot, law_plots
from megalite.ladder.rule import load_family
from megalite.page.plot import picture
from megalite.planner.estimate import estimate
from megalite.planner.machines import load_machine
from megalite.sweeps.record import TrialRecord
from megalite.sweeps.space import overrides_of
from tests.kit.html import Reader
from tests.kit.runs import megalite, write_run

ONE_RANK = {"parallel": {"tp": 1, "zero_stage": 0}, "model": {"num_layers": 4, "num_kv_heads": 2}}


def chinchilla(n: float, d: float) -> float:
    return 1.69 + 406.4 / n**0.34 + 410.7 / d**0.28


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_run(tmp_path, **ONE_RANK)


@pytest.fixture
def law():
    pairs = [(n, n * ratio) for n in (1e5, 2e5, 4e5) for ratio in (5, 10, 20)]
    return fit_law(*zip(*pairs, strict=True), [chinchilla(*pair) for pair in pairs], num_draws=20)


def test_the_rule(config):
    """Heads keep their width, shapes their ratios; N and FLOPs are those of the model that is built of the settings."""
    family = load_family(config, (), [16, 48, 64], "scaled")
    assert family.granule == 16
    size = family.size(64)
    loaded = load_config(config, overrides_of(size.settings))
    assert (loaded.model.num_layers, loaded.model.num_heads, loaded.model.num_kv_heads) == (8, 8, 4)
    assert (loaded.model.head_dim, loaded.model.ffn_hidden_size) == (8, 128)
    plan = make_plan(loaded, 1)
    assert size.num_parameters == plan.num_parameters - 1000 * 64  # the table that is only looked up
    assert size.flops_per_token == plan.flops_per_token
    base = family.size(32)
    assert make_plan(load_config(config, overrides_of(base.settings)), 1).num_parameters == (
        make_plan(load_config(config), 1).num_parameters
    )
    assert load_family(config, (), [64], "fixed").size(64).layers == 4
    run = family.run(size, 10)
    assert run["train.steps"] == round(10 * size.num_parameters / 128)


def test_tied_tables_count(config):
    """A tied embedding is the head, which every token is multiplied with."""
    family = load_family(config, ("model.tie_embeddings=true",), [32], "scaled")
    assert (
        family.size(32).num_parameters
        == make_plan(load_config(config, ["model.tie_embeddings=true"]), 1).num_parameters
    )


def test_what_the_rule_refuses(config):
    """Widths without whole heads, twice the same, and models that it has no rule for; all at once."""
    with pytest.raises(ConfigError) as refused:
        load_family(config, ("model.layer_types=[full_attention]",), [24, 32, 32], "scaled")
    said = str(refused.value)
    assert "--widths: 24 gives no whole number of heads (4 and 2 at 32); use 16 or 32" in said
    assert "--widths: 32 is there twice" in said
    assert "model.layer_types: how it grows" in said
    with pytest.raises(ConfigError, match="a ladder wants one batch"):
        load_family(config, ("batch.ramp={start_size: 2, samples: 8}",), [32], "scaled")
    family = load_family(config, (), [32], "scaled")
    for text in ("32", "32:", "x:1", "32:-1", "32:nan"):
        with pytest.raises(UserError, match="--target: found"):
            read_target(text, family, "--target")
    with pytest.raises(ConfigError, match="--target: 24 gives no whole"):
        read_target("24:5", family, "--target")
    plan = Plan(family, config, (), Path("x"), (16,), (0.01, 0.011))
    assert any("two of them are" in each for each in plan.problems())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--widths", "16,32", "--ratios", "1,2"), "cannot be fitted to 4 runs of 2 sizes"),
        (("--widths", "16,32,48", "--ratios", "1"), "cannot be fitted to 3 runs of 3 sizes"),
        (("--widths", "16,32,48", "--ratios", "1,2", "--hours", "1", "--machine", "nosuch"), "nosuch"),
    ],
)
def test_what_would_be_told_after_the_last_run(options, said, config, tmp_path):
    """Too few runs for a law, and a machine that nobody knows, are told before the first run."""
    call = ["ladder", str(config), *options, "--dir", str(tmp_path / "ladder"), "--check"]
    with pytest.raises(UserError, match=said):
        CliRunner().invoke(app, call, catch_exceptions=False)


def test_the_best_size_for_flops(config, law):
    """The least loss of all legal widths, each with the tokens that its real FLOPs leave."""
    family = load_family(config, (), [32], "scaled")
    found = best_for_flops(family, law, 1e13)
    brute = {}
    for width in range(16, 1024, 16):
        size = family.size(width)
        brute[width] = chinchilla(size.num_parameters, 1e13 / size.flops_per_token)
    assert found.chosen.size.width == min(brute, key=brute.__getitem__)
    assert found.chosen.loss == pytest.approx(min(brute.values()), rel=1e-4)
    assert found.flops == pytest.approx(1e13)
    assert found.interval.low <= found.interval.value <= found.interval.high
    assert far_off(found, 1e12, 1e12) is None
    assert "a guess" in str(far_off(found, 1e3, 1e12))
    Reader(f"<!doctype html><html lang='en'><body>{picture([budget_plot(law, found)])}</body></html>")
    with pytest.raises(UserError, match="not a step of 128 tokens"):
        best_for_flops(family, law, 10.0)


def test_the_best_size_for_hours(config, law):
    """The tokens are the planner's tokens a second of that very model, for so long."""
    family = load_family(config, (), [32], "scaled")
    found = best_for_hours(family, law, 0.01, "cpu", 1)
    said = estimate(family.with_size(found.chosen.size), 1, load_machine("cpu"), vocab_size=1000)
    assert found.chosen.num_tokens == pytest.approx(36 * said.tokens_per_second)
    assert found.chosen.loss <= min(each.loss for each in found.others)


def test_what_came_is_compared(config, law):
    """Runs without a loss are left out; a target bears its error, relative."""
    family = load_family(config, (), [32], "scaled")
    point = {"run": family.run(family.size(32), 5)}
    records = [
        TrialRecord(number=1, point=point, state="done", value=4.0),
        TrialRecord(number=2, point=point, state="diverged"),
    ]
    (run,) = runs_of(family, records)
    assert run.num_tokens == 128 * point["run"]["train.steps"]
    assert run.flops == run.num_tokens * family.size(32).flops_per_token
    told = foretell(family, law, 64, 5)
    assert told.error is None
    assert told.loss.value == pytest.approx(chinchilla(told.size.num_parameters, told.num_tokens), rel=1e-6)
    Reader(f"<!doctype html><html lang='en'><body>{picture(law_plots([run], law, [told]))}</body></html>")


def test_a_whole_ladder(tmp_path):
    """Six runs of three sizes and a target are trained, once: the second call reads them. The JSON has the
    runs, the law, what was foretold and what came, also where a budget is too small for a step, and a rung may be
    added behind the others."""
    config = write_run(
        tmp_path,
        parallel={"tp": 1, "zero_stage": 0},
        model={"num_layers": 1, "num_heads": 4, "tie_embeddings": True},
        schedule={"warmup_steps": 0, "warmup_fraction": 0.2},
        train={"steps": 1, "eval_batches": 1, "device": "cpu", "compile": "off"},
        monitor={"tensorboard": False},
    )
    options = ("--ratios", "0.02,0.06", "--dir", tmp_path / "ladder", "--jobs", "2", "--json")
    call = ("ladder", config, "--widths", "8,16,32", *options, "--target", "64:0.02", "--flops", "1e10")
    done = megalite(*call)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["runs"]) == 6
    (target,) = found["targets"]
    assert target["error"] == pytest.approx(target["predicted"]["value"] / target["measured"] - 1)
    assert np.isfinite(target["measured"])
    assert found["best"]["tokens"] * 6 < 1e10
    assert json.loads((tmp_path / "ladder" / "ladder.json").read_text()) == found
    Reader((tmp_path / "ladder" / "ladder.html").read_text())
    again = megalite(*call)
    assert "trial" not in again.stderr
    assert json.loads(again.stdout) == found
    poor = megalite("ladder", config, "--widths", "8,16,32", *options, "--flops", "1")
    assert poor.returncode == 2
    kept = json.loads((tmp_path / "ladder" / "ladder.json").read_text())
    assert (kept["runs"], kept["law"], kept["best"]) == (found["runs"], found["law"], None)
    refused = megalite("ladder", config, "--widths", "16,8,32", *options)
    assert refused.returncode == 2
    assert "go on with the sizes" in refused.stderr
