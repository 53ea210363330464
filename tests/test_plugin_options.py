"""What a config tells plug-ins is checked before anything starts, and what they bring is tried."""

from __future__ import annotations

import pytest

from tests.kit.plugins import SINE, complaints, loaded, sample, write_plugin


@pytest.fixture(autouse=True)
def _forgotten():
    with loaded():
        yield


@pytest.mark.parametrize(
    ("schedule", "complaint"),
    [
        ("{name: sine}", "schedule.options.waves: missing; expected a whole number"),
        ("{name: sine, options: {waves: 2, wave: 3}}", "schedule.options.wave: unknown key (did you mean 'waves'?)"),
        ("{name: sine, options: {waves: 2.5}}", "schedule.options.waves: found 2.5, expected a whole number"),
        ("{name: sine, options: {waves: true}}", "schedule.options.waves: found true, expected a whole number"),
        ("{name: sine, options: {waves: 1, depth: much}}", 'schedule.options.depth: found "much", expected a number'),
        ("{name: sine, options: 3}", "schedule.options: found 3, expected a group"),
        ("{name: cosine, options: {waves: 2}}", "schedule.options: found waves, but schedule cosine is no plug-in's"),
        ("{name: sin}", "schedule.name: found \"sin\" (did you mean 'sine'?), expected constant, linear,"),
        (
            "{name: sine, options: {waves: 2}, power: 3}",
            "schedule.power: found 3.0, but it has no effect",
        ),
    ],
)
def test_options(tmp_path, schedule, complaint):
    """What a config tells a plug-in is checked as its own settings are: file, line, what was found and expected."""
    path = write_plugin(tmp_path, SINE)
    found = complaints(
        tmp_path, f"plugins: [{path}]\ntrain: {{steps: 10}}\nmodel: {{vocab_size: 64}}\nschedule: {schedule}"
    )
    assert any(complaint in each for each in found), found


@pytest.mark.parametrize(
    ("rate", "complaint"),
    [
        ("float('nan')", "at step 1 of 10 after warmup, gives the rate nan, expected a number of at least 0"),
        ("-1.0 if k == 10 else 1.0", "at step 10 of 10 after warmup, gives the rate -1.0"),
        ("'high'", "gives the rate 'high'"),
        ("1 / (k - 5)", "at step 1 of 10 after warmup, gives the rate -0.25"),
        ("[][k]", "at step 1 of 10 after warmup, failed: IndexError"),
    ],
)
def test_a_schedule_is_tried_before_training(tmp_path, rate, complaint):
    """A rate that is none is found over the whole run, not in its last night."""
    path = write_plugin(tmp_path, f"extend.schedule('odd')(lambda k, n, peak, min_lr: {rate})")
    text = f"plugins: [{path}]\ntrain: {{steps: 10}}\nmodel: {{vocab_size: 64}}\nschedule: {{name: odd}}"
    assert any(complaint in each for each in complaints(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("train: {components: {coverag: }}", "train.components.coverag: found \"coverag\" (did you mean 'coverage'?)"),
        ("train: {components: {coverage: {enogh: 1}}}", "train.components.coverage.enogh: unknown key"),
        ("train: {components: {coverage: 3}}", "train.components.coverage: found 3, expected a group of options"),
        ("monitor: {metrics: {nothing: }}", 'monitor.metrics.nothing: found "nothing"'),
        ("train: {loss: {name: focal, options: {gamma: x}}}", 'train.loss.options.gamma: found "x", expected a number'),
        ("train: {loss: {options: {gamma: 2}}}", "looks like something else) - Name of a loss that a plug-in brings"),
        ("train: {loss: {name: huber}}", 'train.loss.name: found "huber"'),
        ("optimizer: {name: signum, options: {beta: x}}", 'optimizer.options.beta: found "x", expected a number'),
        (
            "optimizer: {name: signum, nesterov: no}",
            "optimizer.nesterov: found False, but it has no effect",
        ),
        (
            "{model: {mup: {base_hidden_size: 64}}, optimizer: {name: signum}}",
            "how signum scales with the width",
        ),
        (
            "{model: {z_loss: 0.1}, train: {loss: {name: focal}}}",
            "model.z_loss: 0.1 has no effect with train.loss=",
        ),
    ],
)
def test_every_kind_is_checked(tmp_path, text, complaint):
    """Also what only plug-ins bring, and what goes with what."""
    with loaded(*map(sample, ("components", "losses", "optimizers"))):
        assert any(complaint in each for each in complaints(tmp_path, text)), complaint
