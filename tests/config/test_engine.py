"""Which engine a config gets that names none."""

import pytest

from megalite.config.engine import choose_engine
from megalite.config.plan import compile_pays, make_plan
from tests.config.configs import complaints, config

BF16 = {"dtype": "bf16"}

CHOSEN = {
    "ZeRO-0": ("native", {"parallel": {"zero_stage": 0}, "precision": {"dtype": "fp32"}}),
    "ZeRO-1": ("native", {}),
    "a pipeline": ("native", {"parallel": {"pp": 2}}),
    "ZeRO-2": ("deepspeed", {"parallel": {"zero_stage": 2}}),
    "ZeRO-3": ("fsdp2", {"parallel": {"zero_stage": 3}}),
    "ZeRO-3 over experts": (
        "fsdp2",
        {"parallel": {"zero_stage": 3, "ep": 2, "dp": 2}, "model": {"moe": {}}, "batch": {"global_batch_size": 2}},
    ),
    "ZeRO-3 in few bits": ("fsdp2", {"parallel": {"zero_stage": 3}, "precision": {**BF16, "gather_bits": 8}}),
    "ZeRO-3 with an offloaded optimizer": ("fsdp2", {"parallel": {"zero_stage": 3}, "optimizer": {"offload": True}}),
    "ZeRO-3 in FP8": (
        "fsdp2",
        {"parallel": {"zero_stage": 3}, "precision": {**BF16, "fp8": {"backend": "emulate"}}},
    ),
    "ZeRO-3 with masters in bf16": (
        "deepspeed",
        {"parallel": {"zero_stage": 3}, "precision": {**BF16, "master_dtype": "bf16"}},
    ),
    "ZeRO-3 that measures noise": ("deepspeed", {"parallel": {"zero_stage": 3}, "batch": {"noise_scale": {}}}),
    "a name": ("deepspeed", {"parallel": {"zero_stage": 3, "engine": "deepspeed"}}),
}


@pytest.mark.parametrize(("engine", "sections"), CHOSEN.values(), ids=CHOSEN)
def test_engine(engine: str, sections: dict):
    """ZeRO-3 is FSDP2's, but for what only DeepSpeed has; and whoever is taken has nothing to refuse."""
    chosen = config(**sections)
    world_size = 2 if chosen.parallel.ep > 1 or chosen.parallel.pp > 1 else 1
    assert choose_engine(chosen) == engine
    assert complaints(chosen, world_size) == ()


@pytest.mark.parametrize(("engine", "is_compiled"), [(None, True), ("deepspeed", False)])
def test_divided_weights_are_compiled(engine: str | None, is_compiled: bool):
    """A long run at ZeRO-3 compiles its blocks, unless it names the engine that cannot."""
    long = config(parallel={"zero_stage": 3, "engine": engine}, train={"steps": 10**6})
    assert compile_pays(long, make_plan(long, 1, 512), "cuda") is is_compiled
