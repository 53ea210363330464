"""The ladder from a skipped batch to a rollback, step by step."""

from __future__ import annotations

import json

import numpy as np
import pytest

from megalite.config.sections.health import SpikesConfig
from megalite.train.spike_detector import SpikeDetector

SETTINGS = SpikesConfig(sigma=3.0, window=8, cut_after=2, cut_steps=10, cut_factor=0.25, roll_back_after=3)


def watch(num_good: int = 8) -> SpikeDetector:
    """After some good steps around loss 2 and norm 1."""
    one = SpikeDetector(SETTINGS, {})
    for step in range(1, num_good + 1):
        one.note(step, 2.0 + 0.1 * (step % 3), 1.0, is_spike=False)
    return one


def test_a_spike_is_k_sigma_above_the_window():
    """Against numpy's mean and deviation: just below the border is none, just above is one; a drop never is."""
    losses = [2.0 + 0.1 * (step % 3) for step in range(1, 9)]
    border = np.mean(losses) + SETTINGS.sigma * np.std(losses)
    assert watch().why_spike(border - 1e-6, 1.0) == ""
    assert "loss" in watch().why_spike(border + 1e-6, 1.0)
    assert "gradient norm" in watch().why_spike(2.0, 9.0)
    assert watch().why_spike(0.0, 0.0) == ""


def test_nothing_is_judged_before_the_window_is_full():
    """The first steps fall and jump."""
    assert watch(7).why_spike(1e9, 1e9) == ""
    assert watch(8).why_spike(1e9, 1e9) != ""


def test_equal_values_do_not_make_a_spike_of_the_next():
    """A window without any spread takes a thousandth of its mean for one."""
    one = SpikeDetector(SETTINGS, {})
    for step in range(8):
        one.note(step, 2.0, 1.0, is_spike=False)
    assert one.why_spike(2.005, 1.0) == ""
    assert one.why_spike(2.007, 1.0) != ""


def test_the_ladder():
    """Two spikes cut the rate for ten steps, three more within them ask for a rollback to before the first."""
    one = watch()
    assert [one.note(step, 9.0, 9.0, is_spike=True) for step in (9, 10)] == ["none", "cut"]
    assert [one.lr_factor(step) for step in (10, 20, 21)] == [0.25, 0.25, 1.0]
    assert one.note(11, 2.0, 1.0, is_spike=False) == "none"
    assert [one.note(step, 9.0, 9.0, is_spike=True) for step in (12, 13, 14)] == ["none", "none", "roll back"]
    assert one.first_spike == 9


@pytest.mark.parametrize(("last", "remedy"), [(20, "roll back"), (21, "cut")])
def test_the_last_step_of_a_cut_belongs_to_it(last, remedy):
    """Three spikes up to step 20, for which the rate was cut, ask for a rollback; a step later it is cut anew."""
    one = watch()
    for step in (9, 10):
        one.note(step, 9.0, 9.0, is_spike=True)
    assert one.cut_until == 20
    assert [one.note(step, 9.0, 9.0, is_spike=True) for step in (last - 2, last - 1, last)] == ["none", "none", remedy]


@pytest.mark.parametrize(("gap", "remedy"), [(7, "cut"), (8, "none")])
def test_spikes_that_are_far_apart_have_nothing_to_do_with_each_other(gap, remedy):
    """More than a window apart the count begins anew."""
    one = watch()
    one.note(9, 9.0, 9.0, is_spike=True)
    for step in range(10, 9 + gap):
        one.note(step, 2.0, 1.0, is_spike=False)
    assert one.note(9 + gap, 9.0, 9.0, is_spike=True) == remedy


def test_a_quiet_window_ends_the_trouble():
    """Old checkpoints may go again, once the cut is over too."""
    one = watch()
    one.note(9, 9.0, 9.0, is_spike=True)
    one.note(10, 9.0, 9.0, is_spike=True)
    for step in range(11, 21):
        assert one.first_spike == 9
        one.note(step, 2.0, 1.0, is_spike=False)
    assert one.first_spike is None


def test_the_state_is_all_there_is():
    """Taken through JSON in the middle of a cut, a copy decides as the original does, to the end."""
    one = watch()
    for step in (9, 10, 12):
        one.note(step, 9.0, 9.0, is_spike=True)
    other = SpikeDetector(SETTINGS, json.loads(json.dumps(one.state())))
    rng = np.random.default_rng(0)
    for step in range(13, 60):
        loss = float(rng.choice([2.0, 2.1, 9.0], p=[0.5, 0.3, 0.2]))
        said = one.why_spike(loss, 1.0)
        assert other.why_spike(loss, 1.0) == said
        assert other.note(step, loss, 1.0, is_spike=bool(said)) == one.note(step, loss, 1.0, is_spike=bool(said))
        assert other.lr_factor(step) == one.lr_factor(step)
        assert other.state() == one.state()
