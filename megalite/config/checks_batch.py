"""What must hold between the settings of `batch`, and the layout."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.batch_sizes import ramp_increment
from megalite.config.engine import choose_engine
from megalite.config.plan import derive_dp, ends_apart
from megalite.config.schema import Config, RampConfig
from megalite.config.wording import divisors, near, or_

MOST_MICRO_BATCHES = 100_000
"""Of a rank in a step. A schedule of more would take minutes to make, and no run has a use for it."""


def check_batch(config: Config, world_size: int) -> Iterator[str]:
    """Complaints about batch sizes: every one must be whole micro-batches on every rank."""
    parallel, batch = config.parallel, config.batch
    if batch.ramp is not None:
        yield from _ramp(batch.ramp, batch.global_batch_size)
    if batch.noise_scale is not None:
        yield from _noise_scale(config, batch.noise_scale.max_batch_size)
    if parallel.dp is None and world_size % (parallel.pp * parallel.cp * parallel.tp):
        return  # dp is unknown, which is said elsewhere
    dp = derive_dp(config, world_size)
    unit = batch.micro_batch_size * dp
    sizes = {"global_batch_size": batch.global_batch_size}
    if batch.ramp is not None:
        sizes |= {"ramp.start_size": batch.ramp.start_size, "ramp.increment": ramp_increment(batch.ramp)}
    for name, size in sizes.items():
        if size % unit:
            yield (
                f"batch.{name}: {size} is not a multiple of micro_batch_size x dp = {batch.micro_batch_size} x {dp} = "
                f"{unit}; use {or_(near(size, unit))}"
            )
    if batch.noise_scale is not None and batch.noise_scale.max_batch_size is not None:
        sizes["noise_scale.max_batch_size"] = batch.noise_scale.max_batch_size
    for name, size in sizes.items():
        if size // unit > MOST_MICRO_BATCHES:
            yield (
                f"batch.{name}: {size} is {size // unit} micro-batches of {batch.micro_batch_size} on each of dp={dp} "
                f"ranks, expected at most {MOST_MICRO_BATCHES}; use {MOST_MICRO_BATCHES * unit} or less, or a larger "
                "micro_batch_size"
            )
    yield from _shares(config, dp)
    least = batch.ramp.start_size if batch.ramp is not None else batch.global_batch_size
    if batch.noise_scale is not None and least == unit == batch.micro_batch_size:
        yield (
            f"batch.noise_scale: a step of {least} sequences is one micro-batch, and it takes two to compare; use "
            "a smaller micro_batch_size"
        )


def _shares(config: Config, dp: int) -> Iterator[str]:
    """Of the dp ranks in a step."""
    parallel, batch = config.parallel, config.batch
    if batch.shares == "even":
        return
    if choose_engine(config) != "native" or parallel.pp > 1 or parallel.ep > 1:
        yield (
            f"batch.shares: found with engine={choose_engine(config)}, pp={parallel.pp}, ep={parallel.ep}, where "
            "ranks work in step through every micro-batch; use engine=native, pp=1 and ep=1, or shares=even"
        )
    if isinstance(batch.shares, tuple) and len(batch.shares) != dp:
        yield f"batch.shares: found {len(batch.shares)} speeds for dp={dp} ranks; give one for each"
    elif dp == 1 or batch.global_batch_size <= batch.micro_batch_size * dp:
        yield (
            f"batch.shares: a step of {batch.global_batch_size} sequences has one micro-batch of "
            f"{batch.micro_batch_size} for each of dp={dp} ranks, and nothing to deal out; use shares=even, or a "
            "smaller micro_batch_size"
        )


def _noise_scale(config: Config, most: int | None) -> Iterator[str]:
    """With growth up to a batch of `most` sequences; None for none."""
    batch, mix = config.batch, config.data.mix
    if config.precision.dtype == "fp16":
        yield "batch.noise_scale: gradients are scaled in fp16, and by changing factors; use dtype=bf16, or null"
    if (config.model.tie_embeddings or config.model.mtp is not None) and ends_apart(config.parallel):
        yield (
            "batch.noise_scale: an embedding that the stage of the head has too (tie_embeddings, mtp) has its gradient "
            "in two parts, which are never whole for a single micro-batch; use schedule=zb-v, pp=1 or null"
        )
    if most is None:
        return
    size = batch.global_batch_size
    if most < 2 * size:
        yield f"batch.noise_scale.max_batch_size: {most} leaves no room to double {size}; use {2 * size} or more"
    if batch.ramp is not None:
        yield "batch.noise_scale.max_batch_size: found beside batch.ramp; let one of them decide the batch size"
    if config.train.tokens is not None:
        yield (
            "batch.noise_scale.max_batch_size: with growing batches train.tokens does not say how many steps there "
            "are, which the schedule must know; set train.steps"
        )
    if mix.epochs or any(stage.share is not None for stage in mix.stages):
        yield (
            "batch.noise_scale.max_batch_size: data.mix asks for epochs or shares of the run, whose samples are not "
            "known beforehand; use weights and until_tokens"
        )


def _ramp(ramp: RampConfig, size: int) -> Iterator[str]:
    """Of a ramp that ends at a batch of `size` sequences."""
    if (ramp.samples is None) == (ramp.tokens is None):
        found = "both samples and tokens" if ramp.samples else "neither samples nor tokens"
        yield f"batch.ramp: found {found}; give one of them, the data over which the batch grows"
    if ramp.start_size >= size:
        yield (
            f"batch.ramp.start_size: {ramp.start_size} is not below global_batch_size={size}; use a smaller one, or "
            "ramp=null"
        )
    elif (size - ramp.start_size) % ramp_increment(ramp):
        yield (
            f"batch.ramp.increment: steps of {ramp_increment(ramp)} do not lead from {ramp.start_size} to "
            f"global_batch_size={size}; use {or_(divisors(size - ramp.start_size)[-4:])}"
        )
