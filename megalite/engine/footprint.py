"""What the engine of a config keeps of each parameter, and its buffers: arithmetic for the planner, without torch."""

from __future__ import annotations

from megalite.config.engine import choose_engine
from megalite.config.plan import RunPlan
from megalite.config.schema import Config
from megalite.engine.deepspeed.footprint import footprint as of_deepspeed
from megalite.engine.fsdp2.footprint import footprint as of_fsdp2
from megalite.engine.kept import EngineNumbers, Footprint
from megalite.engine.native.footprint import footprint as of_native

HOLES = {"native": (0.05,) * 4, "fsdp2": (0.3,) * 4, "deepspeed": (0.05, 0.25, 0.55, 0.55)}
"""Free bytes of a CPU's heap for one of tensors at their peak, by engine and ZeRO stage (`planner.process`). FSDP2
gathers weights and adds up gradients while other tensors come and go, and so does DeepSpeed from stage 2 on, one by
one."""


def footprint(config: Config, plan: RunPlan, numbers: EngineNumbers) -> Footprint:
    """What the engine keeps on a rank."""
    engine = choose_engine(config)
    return {"native": of_native, "fsdp2": of_fsdp2, "deepspeed": of_deepspeed}[engine](config, plan, numbers)


def holes_per_byte(config: Config) -> float:
    """Of a CPU's heap for each byte of tensors at their peak: what lies free, where as large ones fit no more."""
    return HOLES[choose_engine(config)][config.parallel.zero_stage]
