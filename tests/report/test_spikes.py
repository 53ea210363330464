"""Spikes of the loss are found where a person would see them, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest

from megalite.report.spikes import MAX_SPIKES, find_spikes


def noisy(num_steps: int) -> np.ndarray:
    """A loss that falls as they do, with the noise of a batch."""
    steps = np.arange(1, num_steps + 1)
    return 2 + 8 / np.sqrt(steps) + np.random.default_rng(0).normal(0, 0.05, num_steps)


def test_each_spike_once_with_its_height():
    """One of a single step and one that takes three; each is told with what came right before it."""
    loss = noisy(100_000)
    loss[40_000] += 3
    loss[73_210:73_213] += [0.7, 1.0, 0.6]
    first, second = find_spikes(loss)
    assert (first.index, second.index) == (40_000, 73_211)
    assert first.loss - first.before == pytest.approx(3, abs=0.2)
    assert second.before == pytest.approx(2.03, abs=0.1)


@pytest.mark.parametrize("num_steps", [0, 1, 19, 60, 1000, 50_000])
def test_noise_and_a_falling_loss_are_no_spikes(num_steps):
    """Whatever the length of the run."""
    assert find_spikes(noisy(num_steps)) == []


def test_gaps_and_infinities():
    """Steps without a loss are passed over, also where a whole stretch has none; infinity is an event, not a spike."""
    loss = noisy(3000)
    loss[100:900] = np.nan
    loss[1500] = np.inf
    loss[1990:2000] = np.nan
    loss[2000] += 1
    assert [spike.index for spike in find_spikes(loss)] == [2000]
    assert find_spikes(loss)[0].before == pytest.approx(2.17, abs=0.1)


def test_the_largest_are_kept():
    """Of a run with hundreds of them."""
    loss = noisy(50_000)
    heights = np.linspace(1, 4, 200)
    loss[10_000:50_000:200] += heights
    found = find_spikes(loss)
    assert len(found) == MAX_SPIKES
    assert min(spike.loss - spike.before for spike in found) > heights[-MAX_SPIKES - 5]
    assert [spike.index for spike in found] == sorted(spike.index for spike in found)
