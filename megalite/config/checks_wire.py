"""What must hold between the settings of what replicas send each other: bits, and who keeps what is gathered."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.engine import choose_engine
from megalite.config.plan import derive_dp
from megalite.config.schema import Config
from megalite.config.wording import divisors, or_, unused


def check_wire(config: Config, world_size: int) -> Iterator[str]:
    """Complaints about `precision.reduce_bits` and `gather_bits`, `parallel.reduce_within` and `hpz_size`."""
    engine = choose_engine(config)
    if engine == "deepspeed":
        for key in ("reduce_bits", "gather_bits"):
            if (bits := getattr(config.precision, key)) is not None:
                yield (
                    f"precision.{key}: found {bits}, but engine=deepspeed sends whole numbers; use engine=fsdp2 with "
                    "zero_stage=3, engine=native with zero_stage=1, or null"
                )
    else:
        yield from _bits(config, engine)
    if config.precision.reduce_bits is None:
        yield from unused(config.parallel, ("reduce_within",), "parallel", "precision.reduce_bits=null")
    yield from _groups(config, world_size, "reduce_within")
    if engine == "fsdp2":
        yield from _groups(config, world_size, "hpz_size")
    else:
        yield from unused(config.parallel, ("hpz_size",), "parallel", f"engine={engine}")


def _bits(config: Config, engine: str) -> Iterator[str]:
    precision, parallel = config.precision, config.parallel
    if precision.reduce_bits is not None and (engine == "fsdp2" or parallel.zero_stage == 1):
        because = f"reduce_bits={precision.reduce_bits}, whose sums are fp32"
        yield from unused(precision, ("reduce_dtype",), "precision", because)
    if precision.reduce_bits is not None and config.batch.noise_scale is not None:
        yield (
            "batch.noise_scale: gradients of single micro-batches are exact, and with precision.reduce_bits those of "
            "the batch are rounded; use null for one of the two"
        )
    if precision.reduce_bits is not None and parallel.dp_replicate > 1:
        yield (
            f"precision.reduce_bits: {precision.reduce_bits} bits would travel within each of "
            f"dp_replicate={parallel.dp_replicate} groups, and fp32 between them, which is the longer way; use "
            "dp_replicate=1, with hpz_size where gathers should stay near, or null"
        )
    if precision.gather_bits is not None and engine == "native" and parallel.zero_stage == 0:
        because = "zero_stage=0, which gathers no weights"
        yield from unused(precision, ("gather_bits",), "precision", because)
    if precision.gather_bits is not None and precision.qat is not None:
        yield (
            "precision.gather_bits: precision.qat rounds weights as they are exported, and these would be rounded ones "
            "already; use null, or qat=null"
        )


def _groups(config: Config, world_size: int, key: str) -> Iterator[str]:
    """Of a setting that is a number of neighbouring replicas."""
    parallel, size = config.parallel, getattr(config.parallel, key)
    if size is None:
        return
    shards = derive_dp(config, world_size) * parallel.cp // parallel.dp_replicate
    fitting = [each for each in divisors(shards) if 1 < each < shards]
    if size not in fitting:
        use = f"use {or_([*fitting, 'null'])}"
        yield f"parallel.{key}: {shards} ranks divide the work, not into smaller groups of {size}; {use}"
    if parallel.ep > 1:
        yield f"parallel.{key}: experts are divided over all of their replicas; use null, or ep=1"
