"""What the engine of a config keeps of each parameter, and its buffers: arithmetic for the planner, without torch."""

from __future__ import annotations

from megalite.config.engine import choose_engine
from megalite.config.plan import RunPlan
from megalite.config.schema import Config
from megalite.engine.deepspeed.footprint import footprint as of_deepspeed
from megalite.engine.fsdp2.footprint import footprint as of_fsdp2
from megalite.engine.kept import EngineNumbers, Footprint
from megalite.engine.native.footprint import footprint as of_native


def footprint(config: Config, plan: RunPlan, numbers: EngineNumbers) -> Footprint:
    """What the engine keeps on a rank."""
    engine = choose_engine(config)
    return {"native": of_native, "fsdp2": of_fsdp2, "deepspeed": of_deepspeed}[engine](config, plan, numbers)
