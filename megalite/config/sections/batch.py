"""The section `batch`: sizes of a step's batch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from megalite.architecture.settings import RopeConfig
from megalite.config.sections.data import SourceConfig
from megalite.section import Section


class RampConfig(Section):
    """Batches that grow at the start of a run, in equal increments over equal amounts of data."""

    start_size: PositiveInt
    """Sequences in the first step; a multiple of micro_batch_size x dp."""
    increment: PositiveInt | None = None
    """Sequences by which the batch grows each time; null takes start_size."""
    samples: PositiveInt | None = None
    """Sequences after which global_batch_size is reached. Give this or tokens."""
    tokens: PositiveInt | None = None
    """The same in tokens."""


class NoiseScaleConfig(Section):
    """The gradient noise scale (McCandlish et al. 2018), measured from a step's micro-batches against its whole batch,
    and written to metrics.jsonl as `noise_scale`, in tokens."""

    every: PositiveInt = 10
    """Steps between measurements; one costs a pass over the gradients of each micro-batch."""
    smoothing: float = Field(0.9, ge=0.0, lt=1.0)
    """Weight of former measurements in the running means; single ones are very noisy."""
    max_batch_size: PositiveInt | None = None
    """Let the batch double when the noise scale is above it, up to this many sequences; null only measures."""
    min_measurements: PositiveInt = 10
    """Measurements before the batch doubles for the first time, and between two times."""


class LengthStageConfig(Section):
    """A stretch of the run with sequences of another length; what is null, or empty, stays as it was before."""

    from_step: PositiveInt | None = None
    """The first step of this stage. Give this or from_tokens."""
    from_tokens: PositiveInt | None = None
    """It begins with the first step that finds so many tokens behind it."""
    seq_len: PositiveInt | None = None
    """Tokens in a sequence."""
    micro_batch_size: PositiveInt | None = None
    """Sequences a rank sends through the model at once."""
    global_batch_size: PositiveInt | None = None
    """Sequences in one optimizer step."""
    rope: RopeConfig | None = None
    """The model's rotation from here on, whole: what it does not name takes its default."""
    train: tuple[SourceConfig, ...] = ()
    """Sources of this stage, from their beginning. What is packed must be packed for this length; tokens that are not
    are cut anew, those of the stage before too, where none are named."""


class BatchConfig(Section):
    """Sizes of a step's batch."""

    micro_batch_size: PositiveInt = 1
    """Sequences a rank sends through the model at once."""
    global_batch_size: PositiveInt = 8
    """Sequences in one optimizer step, over all ranks and accumulation steps."""
    seq_len: PositiveInt = 512
    """Tokens in a sequence."""
    shares: Literal["even", "measured"] | tuple[PositiveFloat, ...] = "even"
    """How many micro-batches of a step each dp rank takes: all as many; as fast as ranks were before the last restart,
    by a product that each times now and then; or by given speeds, one a dp rank, such as [1, 1, 0.5]. Every token
    weighs the same in any case. Of the native engine without a pipeline."""
    stages: tuple[LengthStageConfig, ...] = ()
    """Later parts of the run, with longer sequences: short ones first are cheaper (docs/long-context.md)."""
    ramp: RampConfig | None = None
    """Start with smaller batches; null for global_batch_size from the first step on."""
    noise_scale: NoiseScaleConfig | None = None
    """Measure how large a batch pays, and let it grow by that; null does neither."""
