"""Every layout trains like plain PyTorch: 20 steps against transformers, loss and gradient norm."""

from __future__ import annotations

import itertools

import pytest
import torch

from megalite.config.plan import make_plan
from megalite.engine.build import build_stage
from megalite.engine.deepspeed.pipeline import PipelineEngine
from megalite.model.initialize import FreshWeights
from megalite.parallel.axes import connect
from megalite.parallel.mesh import Mesh
from tests.kit.reference import reference_training
from tests.kit.spawn import run_ranks
from tests.kit.train import Rank, tiny_config, train

STEPS = 20
LINEAR = torch.nn.functional.linear
LOSS_TOLERANCE = 1e-5
"""fp32 sums in another order, over 20 steps at a high learning rate."""
NORM_TOLERANCE = 1e-4
"""Relative."""


def layout(**parallel):
    """A named case: parallel settings, and under `more` other sections."""
    more = parallel.pop("more", {})
    return {"parallel": {"zero_stage": 1, **parallel}, **more}


TIED = {"model": {"tie_embeddings": True}}
FEW = {"batch": {"micro_batch_size": 4}}
"""Two micro-batches a step in place of four: under tp each costs some twenty collectives, and these the time."""

ACCUM = {"batch": {"micro_batch_size": 1}}
SIX = {"batch": {"micro_batch_size": 1, "global_batch_size": 6}}
GROUPED = {"model": {"num_kv_heads": 2, "qk_norm": True}}

CASES = {
    1: [
        layout(zero_stage=0),
        layout(),
        layout(zero_stage=2),
        layout(zero_stage=3),
        layout(more=TIED),
        layout(more=GROUPED),
        layout(more={"batch": {"micro_batch_size": 8}}),
        layout(more={"train": {"recompute": "selective"}}),
        layout(more={"train": {"recompute": "full"}}),
    ],
    2: [
        *(layout(dp=2, zero_stage=stage) for stage in range(4)),
        layout(tp=2, zero_stage=0),
        *(layout(tp=2, zero_stage=stage, more=FEW) for stage in range(1, 4)),
        layout(tp=2, sequence_parallel=True, more=FEW),
        layout(tp=2, sequence_parallel=True, more={**TIED, **FEW, "train": {"recompute": "selective"}}),
        layout(tp=2, more={**GROUPED, **FEW, "train": {"recompute": "full"}}),
        layout(tp=2, sequence_parallel=True, more={**GROUPED, **FEW}),
        layout(dp=2, zero_stage=3, more={**TIED, "train": {"recompute": "selective"}}),
        layout(dp=2, zero_stage=3, more={"train": {"recompute": "full"}}),
        layout(pp=2, zero_stage=0),
        layout(pp=2),
        layout(pp=2, more=TIED),
        layout(pp=2, zero_stage=0, more=TIED),
        layout(pp=2, more={**ACCUM, "train": {"recompute": "full"}}),
        layout(pp=2, blocks_per_stage=[4, 0]),
        layout(pp=2, blocks_per_stage=[1, 3], more=TIED),
    ],
    3: [layout(dp=3, zero_stage=stage, more={**TIED, **SIX}) for stage in range(4)],  # which leaves padding behind
    4: [
        layout(tp=4, more=FEW),
        layout(tp=4, sequence_parallel=True, more={**TIED, **FEW}),
        layout(dp=4, zero_stage=2, more=ACCUM),
        layout(dp=4, zero_stage=3),
        layout(pp=4),
        layout(pp=4, blocks_per_stage=[1, 2, 1, 0], more={**TIED, **ACCUM}),
        layout(tp=2, dp=2, zero_stage=3, sequence_parallel=True),
        layout(tp=2, dp=2, zero_stage=2, more=TIED),
        layout(pp=2, tp=2, sequence_parallel=True, more=TIED),
        layout(pp=2, dp=2, zero_stage=0, more=TIED),
        layout(pp=2, dp=2),
    ],
    8: [
        layout(pp=2, dp=2, tp=2, sequence_parallel=True, more={"train": {"recompute": "selective"}}),
        layout(pp=2, dp=2, tp=2, more=TIED),
    ],
}


OVER_GLOO = [
    layout(dp=2),
    layout(dp=2, zero_stage=3),
    layout(tp=2, sequence_parallel=True, more=FEW),
    layout(pp=2, more=TIED),
]


def reference_curves(cases: list[dict]) -> list[list[tuple[float, float]]]:
    """The plain curve of each case; runs in a rank so that this process never computes."""
    curves, known = [], {}
    for case in cases:
        config = tiny_config(**case)
        model = make_plan(config, 64).model
        key = model, config.batch.global_batch_size
        if key not in known:
            known[key] = reference_training(config, model, STEPS)
        curves.append(known[key])
    return curves


def train_cases(cases: list[dict]) -> list[list[tuple[float, float]]]:
    curves = [train(tiny_config(**case), STEPS) for case in cases]
    assert torch.nn.functional.linear is LINEAR, "an engine left its own linear behind in torch"
    return curves


@pytest.mark.parametrize("world_size", CASES)
def test_layouts_equal_plain_pytorch(world_size):
    """Loss to 1e-5 and gradient norm to 1e-4 over 20 clipped steps, with uneven masks and packed documents."""
    compare(CASES[world_size], world_size)


def test_layouts_over_gloo():
    """The same over the network that CPUs train over: one layout of each way to talk."""
    compare(OVER_GLOO, 2, backend="gloo")


def compare(cases: list[dict], world_size: int, **options: str) -> None:
    truth = run_ranks(reference_curves, 1, cases)[0]
    ranks = run_ranks(train_cases, world_size, cases, **options)
    complaints = []
    for number, case in enumerate(cases):
        for rank, curves in enumerate(ranks):
            for step, ((loss, norm), (want_loss, want_norm)) in enumerate(
                itertools.zip_longest(curves[number], truth[number]), start=1
            ):
                if abs(loss - want_loss) > LOSS_TOLERANCE or abs(norm / want_norm - 1) > NORM_TOLERANCE:
                    off = f"loss {loss - want_loss:+.1e}, norm {norm / want_norm - 1:+.1e}"
                    complaints.append(f"{case} rank {rank} step {step}: {off}")
                    break
    assert not complaints, "\n".join(complaints)


def one_stage_curves(tied: bool) -> list[list[tuple[float, float]]]:
    """The same run on the plain engine, and on the pipeline engine with a pipeline of one stage."""
    config = tiny_config(**layout(more=TIED if tied else {}))
    curves = [train(config, STEPS)]
    plan = make_plan(config, 1)
    axes = connect(Mesh(), 0)
    stage = build_stage(config, plan, axes, torch.device("cpu"), FreshWeights(plan.model, config.run.seed))
    rank = Rank(config, plan, axes, PipelineEngine(config, plan, axes, stage))
    curves.append(rank.train(0, STEPS))
    return curves


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_one_stage_of_pipeline_equals_plain(tied):
    """The pipeline engine with a single stage computes what the plain engine does, to a rounding."""
    plain, pipeline = run_ranks(one_stage_curves, 1, tied)[0]
    for (loss, norm), (want_loss, want_norm) in zip(pipeline, plain, strict=True):
        assert loss == pytest.approx(want_loss, abs=1e-6)
        assert norm == pytest.approx(want_norm, rel=1e-6)
