"""Which engine does the training steps of a config."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from megalite.config.schema import Config

NATIVE_STAGES = (0, 1)
"""ZeRO stages that the native engine has."""


EngineName = Literal["native", "deepspeed", "fsdp2"]


def choose_engine(config: Config) -> EngineName:
    """The engine that a config names, or else the native one where it can be, and FSDP2 where weights are divided.

    DeepSpeed divides them too, but its blocks cannot be compiled; it takes what FSDP2 does not know.
    """
    parallel = config.parallel
    if parallel.engine is not None:
        return parallel.engine
    if parallel.zero_stage in NATIVE_STAGES or parallel.pp > 1:
        return "native"
    return "fsdp2" if parallel.zero_stage == 3 and not any(unknown_to_fsdp2(config)) else "deepspeed"


def unknown_to_fsdp2(config: Config) -> Iterator[str]:
    """Each setting that needs a gradient or weight whole, or keeps numbers beside it: what to do instead."""
    if config.precision.master_dtype == "bf16":
        yield "precision.master_dtype: engine=fsdp2 keeps masters in fp32; use that, or engine=deepspeed"
    if config.batch.noise_scale is not None:
        yield (
            "batch.noise_scale: engine=fsdp2 reduces gradients before anybody sees those of a micro-batch whole; use "
            "null, or another engine"
        )
