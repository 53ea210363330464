"""The section `health`: what to do when training goes wrong."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from megalite.section import Section


class SpikesConfig(Section):
    """What a spike is, and what follows when they repeat: skip the batch, cut the rate, roll back, end the run.

    A step is a spike when its loss or its gradient norm is more than `sigma` standard deviations above the mean of the
    last `window` good steps. It is left out before the update.
    """

    sigma: PositiveFloat = 6.0
    """Standard deviations above the mean; 6 over 128 steps is what OLMo 2 skips at."""
    window: int = Field(128, ge=4)
    """Good steps that are remembered. Nothing is judged before there are as many; spikes further apart than this many
    steps have nothing to do with each other."""
    cut_after: PositiveInt = 3
    """Spikes within the window that cut the learning rate."""
    cut_factor: float = Field(0.5, gt=0.0, lt=1.0)
    """What the rate is multiplied with while it is cut."""
    cut_steps: PositiveInt = 100
    """For how many steps."""
    roll_back_after: PositiveInt = 3
    """Further spikes, while the rate is cut, that take the run back to its last checkpoint from before the first of
    them. The data that it has read since then is left out."""
    skip_steps: NonNegativeInt = 0
    """Steps' worth of data behind the last spike that are left out too."""


class ExpertsHealthConfig(Section):
    """How evenly tokens must go to experts, and what follows when they do not."""

    every: PositiveInt = 10
    """Steps between looks at the loads of experts, which go to metrics.jsonl."""
    loads_every: PositiveInt | None = 100
    """Steps between records of what every expert had, in experts.jsonl, of which `megalite report` draws a picture of
    each block; null for none."""
    least_entropy: float = Field(0.5, ge=0.0, le=1.0)
    """A router has collapsed when the entropy of its experts' shares of a step's tokens, over that of even ones, is
    below this: 0.33 is two experts of eight. 0 for never."""
    action: Literal["warn", "stop"] = "warn"
    """Write an event and say so; or end the run too, behind a checkpoint."""


class HealthConfig(Section):
    """What to do when training goes wrong."""

    stop_on_nonfinite: bool = True
    """Stop with an error, before the weights are touched, when the loss is NaN or infinite on any rank. Off, such a
    step is skipped, as one with a non-finite gradient norm always is, and counts as a spike where `spikes` is set."""
    spikes: SpikesConfig | None = None
    """Find spikes and act on them; null leaves every finite step alone. `spikes: {}` takes the defaults."""
    check_replicas_every: PositiveInt | None = 100
    """Steps between comparisons of the weights that several ranks hold; there is one before every save too. Null for
    none. A rank whose copy has drifted is named, and the run goes back to its last checkpoint."""
    check_memory_every: PositiveInt | None = 100
    """Steps behind which a rank hashes its masters and optimizer state, and again before the next update: nothing may
    touch them in between. A rank whose memory has changed is named, and the run goes back. Null for none; 1 misses
    nothing, and costs about as much as an AdamW update."""
    experts: ExpertsHealthConfig = ExpertsHealthConfig()
    """Of models with experts: how evenly tokens must go to them."""
    max_rollbacks: PositiveInt = 3
    """Rollbacks without progress between them after which the run ends, with exit code 2."""
