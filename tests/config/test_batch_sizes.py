"""Batch sizes of steps: against a loop that grows the batch one step at a time."""

from __future__ import annotations

import pytest

from megalite.config.batch_sizes import BatchSizes, Span, batch_sizes
from megalite.config.length import derive_samples, derive_steps, fill_schedule
from megalite.config.plan import make_plan
from megalite.config.schema import BatchConfig, Config


def by_hand(start: int, increment: int, full: int, samples: int, num_steps: int) -> list[tuple[int, int]]:
    """First sample and size of each step: the size grows whenever another equal share of the samples is used up."""
    found, used = [], 0
    num_increments = (full - start) // increment
    for _ in range(num_steps):
        size = min(full, start + increment * (used * num_increments // samples))
        found.append((used, size))
        used += size
    return found


@pytest.mark.parametrize(
    ("start", "increment", "full", "samples"),
    [(4, 4, 8, 8), (4, 4, 32, 1000), (2, 6, 32, 77), (8, 8, 64, 10), (1, 1, 16, 1), (16, 16, 512, 5000)],
)
def test_ramp(start, increment, full, samples):
    """Sizes and first samples of every step are those of growing by hand, also where a share of the samples is smaller
    than a batch and several increments fall into one step."""
    ramp = {"start_size": start, "increment": increment, "samples": samples}
    sizes = batch_sizes(BatchConfig(global_batch_size=full, ramp=ramp))
    expected = by_hand(start, increment, full, samples, 400)
    assert [(sizes.first_sample(step), sizes.size(step)) for step in range(1, 401)] == expected
    assert expected[-1][1] == full


def test_a_ramp_over_tokens_is_one_over_their_sequences():
    """Tokens are whole sequences; the increment is the start size when it is not given."""
    options = {"global_batch_size": 16, "seq_len": 32}
    by_tokens = batch_sizes(BatchConfig(**options, ramp={"start_size": 4, "tokens": 32 * 100 + 31}))
    by_samples = batch_sizes(BatchConfig(**options, ramp={"start_size": 4, "increment": 4, "samples": 100}))
    assert by_tokens == by_samples


@pytest.mark.parametrize("sizes", [BatchSizes.fixed(8), BatchSizes((Span(1, 0, 4), Span(4, 12, 8), Span(6, 28, 16)))])
def test_steps_for(sizes):
    """The fewest steps that use at least so many samples."""
    for num_samples in range(100):
        steps = sizes.steps_for(num_samples)
        assert sizes.first_sample(steps + 1) >= num_samples
        assert steps == 0 or sizes.first_sample(steps) < num_samples


def test_changed():
    """A change leaves the steps before it as they were and drops what was to come after it."""
    sizes = BatchSizes((Span(1, 0, 4), Span(4, 12, 8), Span(6, 28, 16)))
    changed = sizes.changed(5, 12)
    assert [changed.size(step) for step in range(1, 8)] == [4, 4, 4, 8, 12, 12, 12]
    assert [changed.first_sample(step) for step in range(1, 8)] == [0, 4, 8, 12, 20, 32, 44]


def test_the_plan_counts_what_a_ramp_reads():
    """A budget of tokens is met by the fewest steps, small ones at the start included, and the plan's totals and a
    warmup in tokens follow."""
    config = Config(
        model={"vocab_size": 64},
        batch={"global_batch_size": 16, "seq_len": 32, "ramp": {"start_size": 4, "samples": 48}},
        schedule={"warmup_tokens": 32 * 20},
        train={"tokens": 32 * 100},
    )
    first = [size for _, size in by_hand(4, 4, 16, 48, 50)]
    steps = next(count for count in range(50) if sum(first[:count]) >= 100)
    assert derive_steps(config) == steps
    assert derive_samples(config) == sum(first[:steps])
    plan = make_plan(config, 1)
    assert plan.total_tokens == 32 * sum(first[:steps])
    assert plan.schedule == fill_schedule(config)
    assert plan.schedule.warmup_steps == next(count for count in range(50) if sum(first[:count]) >= 20)
    assert plan.to_dict()["batch_sizes"][0] == {"first_step": 1, "first_sample": 0, "size": 4}


def test_warmup_as_a_fraction():
    """Rounded to whole steps."""
    config = Config(schedule={"warmup_fraction": 0.1}, train={"steps": 37})
    assert fill_schedule(config).warmup_steps == 4
