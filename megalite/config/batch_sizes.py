"""How many sequences each step takes, and which: the one place where a step becomes a range of global samples.

    step      1   2   3   4   5 ...
    size      4   4   8   8   8          spans: (from step 1, sample 0, size 4), (from step 3, sample 8, size 8)
    samples   0   4   8  16  24 ...      first global sample of the step

Sizes depend on the step alone, never on the layout, so every rank knows the same ranges without asking.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from megalite.config.sections.batch import BatchConfig, RampConfig


@dataclass(frozen=True)
class Span:
    """Steps of one batch size, until the next span begins."""

    first_step: int
    first_sample: int
    """Global samples used before `first_step`."""
    size: int


@dataclass(frozen=True)
class BatchSizes:
    """The batch size of every step, counted from 1."""

    spans: tuple[Span, ...]
    """In order; the first begins at step 1, the last never ends."""

    @classmethod
    def fixed(cls, size: int) -> BatchSizes:
        """One size for all steps."""
        return cls((Span(1, 0, size),))

    def size(self, step: int) -> int:
        """Sequences of a step."""
        return self._span(step).size

    def first_sample(self, step: int) -> int:
        """The first global sample of a step: the number of those used before it."""
        span = self._span(step)
        return span.first_sample + (step - span.first_step) * span.size

    def steps_for(self, num_samples: int) -> int:
        """Steps that use at least `num_samples` sequences, at least 0."""
        span = [span for span in self.spans if span.first_sample < num_samples or span is self.spans[0]][-1]
        return span.first_step - 1 - (span.first_sample - num_samples) // span.size

    def changed(self, first_step: int, size: int) -> BatchSizes:
        """The same sizes before a step, another one from it on."""
        spans = tuple(span for span in self.spans if span.first_step < first_step)
        return BatchSizes((*spans, Span(first_step, self.first_sample(first_step), size)))

    def _span(self, step: int) -> Span:
        assert step >= 1, step
        return self.spans[bisect_right(self.spans, step, key=lambda span: span.first_step) - 1]


def longest_sequence(batch: BatchConfig) -> int:
    """Tokens in a sequence, in the stage where these are most."""
    return max(batch.seq_len, *(stage.seq_len or 0 for stage in batch.stages), 0)


@dataclass(frozen=True)
class StageStart:
    """Where a stage of one length begins."""

    first_step: int
    first_token: int
    """Tokens of the run before it."""
    seq_len: int
    size: int
    """Sequences of a step, once it is fully grown."""


def stage_starts(batch: BatchConfig) -> tuple[StageStart, ...]:
    """Where the run's stages begin, the first at step 1. Rising steps are for `config.validate` to see to."""
    starts, sizes = [StageStart(1, 0, batch.seq_len, batch.global_batch_size)], _first_sizes(batch)
    for stage in batch.stages:
        former = starts[-1]
        step = stage.from_step
        if step is None:
            missing = (stage.from_tokens or 0) - former.first_token
            samples = sizes.first_sample(former.first_step) + -(-missing // former.seq_len)
            step = 1 + sizes.steps_for(max(0, samples))
        token = former.first_token + _tokens_between(sizes, former, step)
        size = stage.global_batch_size or former.size
        sizes = sizes.changed(step, size)
        starts.append(StageStart(step, token, stage.seq_len or former.seq_len, size))
    return tuple(starts)


def tokens_before(batch: BatchConfig, step: int) -> int:
    """Tokens of the steps before one."""
    start = [each for each in stage_starts(batch) if each.first_step <= step][-1]
    return start.first_token + _tokens_between(batch_sizes(batch), start, step)


def steps_for_tokens(batch: BatchConfig, num_tokens: int) -> int:
    """Steps that use at least so many tokens."""
    starts, sizes = stage_starts(batch), batch_sizes(batch)
    start = [each for each in starts if each.first_token < num_tokens or each is starts[0]][-1]
    missing = -(-(num_tokens - start.first_token) // start.seq_len)
    return sizes.steps_for(sizes.first_sample(start.first_step) + missing)


def _tokens_between(sizes: BatchSizes, start: StageStart, step: int) -> int:
    return (sizes.first_sample(step) - sizes.first_sample(start.first_step)) * start.seq_len


def batch_sizes(batch: BatchConfig) -> BatchSizes:
    """The sizes that a config asks for: global_batch_size, or a ramp to it, and those of later stages."""
    sizes = _first_sizes(batch)
    for start in stage_starts(batch)[1:]:
        sizes = sizes.changed(start.first_step, start.size)
    return sizes


def _first_sizes(batch: BatchConfig) -> BatchSizes:
    """Those without later stages."""
    if batch.ramp is None:
        return BatchSizes.fixed(batch.global_batch_size)
    ramp, increment = batch.ramp, ramp_increment(batch.ramp)
    num_increments = (batch.global_batch_size - ramp.start_size) // increment
    length = ramp.samples or (ramp.tokens or 0) // batch.seq_len
    spans, step, sample = [Span(1, 0, ramp.start_size)], 1, 0
    for number in range(1, num_increments + 1):
        missing = -(-number * length // num_increments) - sample
        steps = max(0, -(-missing // spans[-1].size))
        step, sample = step + steps, sample + steps * spans[-1].size
        size = ramp.start_size + number * increment
        spans = [*(spans if steps else spans[:-1]), Span(step, sample, size)]
    return BatchSizes(tuple(spans))


def ramp_increment(ramp: RampConfig) -> int:
    """By how much a ramp grows each time."""
    return ramp.increment or ramp.start_size


def reachable_sizes(batch: BatchConfig) -> list[int]:
    """Every size that a step may have: those of a ramp, and where batches grow by the noise of their gradients, which
    doubles them, as often as they may."""
    sizes = [span.size for span in batch_sizes(batch).spans]
    if batch.noise_scale is not None and batch.noise_scale.max_batch_size is not None:
        while 2 * sizes[-1] <= batch.noise_scale.max_batch_size:
            sizes.append(2 * sizes[-1])
    return sizes
