"""Which engine does the training steps of a config."""

from __future__ import annotations

from typing import Literal

from megalite.config.schema import ParallelConfig

NATIVE_STAGES = (0, 1)
"""ZeRO stages that the native engine has."""


EngineName = Literal["native", "deepspeed", "fsdp2"]


def choose_engine(parallel: ParallelConfig) -> EngineName:
    """The engine that a config names, or else the native one where it can be."""
    if parallel.engine is not None:
        return parallel.engine
    return "native" if parallel.zero_stage in NATIVE_STAGES or parallel.pp > 1 else "deepspeed"
