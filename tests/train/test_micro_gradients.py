"""Squares of micro-batch gradients: every engine against gradients taken one by one."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch

from megalite.model.initialize import FreshWeights
from megalite.model.spec import StageSpec
from megalite.model.transformer import Stage
from megalite.train.components.adaptive_control import AdaptiveControl
from megalite.train.components.component import Step
from megalite.train.micro_gradients import MicroGradients
from tests.kit.batches import step_batches
from tests.kit.spawn import run_ranks
from tests.kit.train import start_rank, tiny_config
from tests.model.stages import run_stage

RELATIVE = 1e-4
"""fp32 gradients summed in another order."""

ENGINES = (None, None, "deepspeed", "deepspeed")
"""By ZeRO stage, those where a gradient is seen whole."""

LAYOUTS = {
    1: [{"zero_stage": 0}],
    2: [
        *({"dp": 2, "zero_stage": stage, "engine": ENGINES[stage]} for stage in range(4)),
        {"tp": 2, "zero_stage": 2, "sequence_parallel": True},
        {"pp": 2, "zero_stage": 1},
        *({"cp": 2, "zero_stage": stage, "engine": ENGINES[stage]} for stage in range(4)),
    ],
    4: [{"cp": 2, "dp": 2, "cp_kind": "ulysses"}, {"cp": 2, "pp": 2}],
}
SIZES = {"global_batch_size": 8, "micro_batch_size": 2, "seq_len": 16, "vocab_size": 101}


def measured(layouts: list[dict]) -> list[dict[str, float]]:
    """The squares of the second step, after one that was not measured; and no hook is left behind."""
    found = []
    for parallel in layouts:
        rank = start_rank(tiny_config(parallel=parallel))
        dp, meter = rank.axes.batch, MicroGradients(rank.engine, rank.axes)
        batches = step_batches(0, dp=dp.size, dp_rank=dp.rank, **SIZES)
        rank.engine.train_step(batches, 0.0)
        meter.start()
        found.append(asdict(meter.finish(batches, rank.engine.train_step(batches, 0.0))))
        assert not any(parameter._backward_hooks for parameter in rank.engine.stage.parameters())
        rank.engine.close()
    return found


def one_by_one() -> dict[str, float]:
    """Plain autograd over each micro-batch and over all, each a mean over its own valid tokens."""
    rank = start_rank(tiny_config(parallel={"zero_stage": 0}))
    stage = Stage(StageSpec(rank.plan.model), FreshWeights(rank.plan.model, rank.config.run.seed))
    batches = step_batches(0, dp=1, dp_rank=0, **SIZES)
    counts = [int(batch.loss_mask.sum()) for batch in batches]
    assert len(set(counts)) > 1

    def square(chosen: list) -> float:
        stage.zero_grad()
        for batch in chosen:
            run_stage(stage, batch).backward()
        tokens = sum(int(batch.loss_mask.sum()) for batch in chosen)
        return sum(float(parameter.grad.square().sum()) for parameter in stage.parameters()) / tokens**2

    return {
        "small": sum(square([batch]) for batch in batches) / len(batches),
        "inverse_small": sum(1 / count for count in counts) / len(counts),
        "large": square(batches),
        "inverse_large": 1 / sum(counts),
    }


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_every_engine(world_size):
    """ZeRO 0 to 3, tp with sequence parallelism, a pipeline; uneven masks."""
    truth = run_ranks(one_by_one, 1)[0]
    for found in run_ranks(measured, world_size, LAYOUTS[world_size]):
        for layout, squares in zip(LAYOUTS[world_size], found, strict=True):
            assert squares == pytest.approx(truth, rel=RELATIVE), layout


def noise_of_one_micro_batch() -> list:
    """What is found in a step of which one micro-batch has labels, and what the run then knows of its noise."""
    rank = start_rank(tiny_config(batch={"noise_scale": {"every": 1}}))
    control = AdaptiveControl(
        rank.config, rank.plan, engine=rank.engine, axes=rank.axes, device=torch.device("cpu"), recorder=None
    )
    batches = [
        each if number == 2 else replace(each, loss_mask=torch.zeros_like(each.loss_mask))
        for number, each in enumerate(step_batches(0, dp=1, dp_rank=0, **SIZES))
    ]
    control.before_step(step := Step(1, batches, range(8), None, 128, 128))
    result = rank.engine.train_step(batches, 0.0)
    control.measure(step, result)
    return [result.skipped, step.figures, control.state()["noise_scale"]["num_measurements"]]


def test_one_micro_batch_with_labels_tells_nothing():
    """The whole batch is then no larger than it, and the step is no measurement."""
    assert run_ranks(noise_of_one_micro_batch, 1) == [[False, {}, 0]]
