"""The planner's bytes against what real engines of each kind hold between micro-batches."""

from __future__ import annotations

import time
from math import prod

import pytest
import torch

from megalite.architecture.costs import ELEMENT_BYTES
from megalite.architecture.weights import weight_table
from megalite.engine.deepspeed.config import deepspeed_config
from megalite.planner.memory import memory_by_stage
from tests.kit.spawn import run_ranks
from tests.planner.test_memory import PRECISIONS, living_storages, planned


@pytest.mark.parametrize(("dtype", "stage"), [("bf16", 1), ("bf16", 3), ("bf16 masters", 2), ("bf16 masters", 3)])
def test_engine_holds_the_planned_state(dtype: str, stage: int):
    """Weights, gradients, optimizer state and gathered weights of a real engine on two ranks, between micro-batches."""
    engine = "native" if stage == 1 else "deepspeed"
    config, plan = _engine_config(dtype, stage, engine)
    (expected,) = memory_by_stage(config, plan)
    planned_bytes = expected.weights + expected.gradients + expected.optimizer
    element = ELEMENT_BYTES["bf16"]
    if stage == 3:
        planned_bytes += element * expected.num_parameters  # all are gathered: there are few
        bucket = deepspeed_config(config, plan)["zero_optimization"]["reduce_bucket_size"]
        planned_bytes += element * bucket  # planned as a buffer, and there between steps
    for measured in run_ranks(_engine_state_bytes, 2, dtype, stage, engine):
        assert measured == pytest.approx(planned_bytes, rel=0.03)  # padding of flat buffers, batches


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_fsdp2_holds_the_planned_state(dtype: str):
    """The same where FSDP2 divides weights: when a block begins, it and what is outside of blocks are gathered, the
    block as it has come and as it is used."""
    config, plan = _engine_config(dtype, 3, "fsdp2")
    (expected,) = memory_by_stage(config, plan)
    once, twice = {"embedding", "final_norm", "head"}, {"blocks.0"}
    gathered = sum(
        prod(weight.shape) * ((weight.layer in once) + 2 * (weight.layer in twice))
        for weight in weight_table(plan.model).values()
    )
    planned_bytes = expected.weights + expected.gradients + expected.optimizer
    planned_bytes += ELEMENT_BYTES[config.precision.dtype] * gathered
    for measured in run_ranks(_engine_state_bytes, 2, dtype, 3, "fsdp2"):
        assert measured == pytest.approx(planned_bytes, rel=0.03)


def _engine_config(dtype: str, stage: int, engine: str | None = None):
    return planned(
        2,
        model={"hidden_size": 128, "ffn_hidden_size": 512, "vocab_size": 64},
        batch={"micro_batch_size": 1, "global_batch_size": 4, "seq_len": 8},
        precision=PRECISIONS[dtype],
        parallel={"zero_stage": stage, "engine": engine},
        train={"steps": 4, "compile": "off"},
    )


def _engine_state_bytes(dtype: str, stage: int, engine_name: str | None = None) -> int:
    import torch.distributed as dist

    from megalite.engine.build import build_engine
    from megalite.model.initialize import FreshWeights
    from megalite.parallel.axes import connect
    from megalite.parallel.mesh import Mesh
    from tests.kit.batches import step_batches

    config, plan = _engine_config(dtype, stage, engine_name)
    rank, batch = dist.get_rank(), config.batch
    before = living_storages()
    axes = connect(Mesh(dp=2), rank)
    engine = build_engine(config, plan, axes, torch.device("cpu"), FreshWeights(plan.model, 1))
    batches = step_batches(
        0,
        global_batch_size=batch.global_batch_size,
        micro_batch_size=batch.micro_batch_size,
        dp=2,
        dp_rank=rank,
        seq_len=batch.seq_len,
        vocab_size=plan.model.vocab_size,
    )
    engine.train_step(batches, 1e-3)  # makes the moments
    marks: list[int] = []

    def new_bytes() -> int:
        return sum(size for where, size in living_storages().items() if where not in before)

    def measure(*_: object) -> None:
        counts = []
        for seconds in (0.0, 0.05, 0.2):  # gloo's thread holds what it has reduced for a moment longer
            time.sleep(seconds)
            counts.append(new_bytes())
        marks.append(min(counts))

    hook = engine.stage.blocks["0"].register_forward_pre_hook(measure)
    engine.train_step(batches, 1e-3)
    hook.remove()
    engine.close()
    return marks[1]  # the second micro-batch finds the first one's gradients
