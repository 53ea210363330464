"""Dropout on: the same tokens lose the same channels in every layout, so losses and gradients agree."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.architecture.weights import weight_table
from megalite.config.plan import make_plan
from megalite.engine.build import build_engine
from megalite.model.initialize import FreshWeights
from megalite.parallel.axes import SINGLE, Axis, connect
from megalite.parallel.mesh import Mesh
from tests.kit.spawn import run_ranks
from tests.kit.train import tiny_config, train
from tests.layers.parity import difference
from tests.model.stages import GPT_STYLE, LATENTS, gradients, make_batch, make_stage, run_stage, tensor_axis, tiny_model

FLOAT64_TOLERANCE = 1e-10
"""Relative to the largest entry where that exceeds 1: another order of sums."""

CURVE_TOLERANCE = 1e-5
"""fp32 over 3 steps at a high learning rate."""

MODELS = {
    "llama": {"dropout": 0.2},
    "gpt": {**GPT_STYLE, "dropout": 0.2, "attention_dropout": 0.2},
    "latents": {**LATENTS, "attention_dropout": 0.2},
}
NUM_SEQUENCES = 8
SPLITS = ((8,), (4, 4), (1, 7), (1,) * 8, (2, 2, 2, 2))
"""Sequences of each micro-batch, on one rank after the other or on data-parallel ranks: the sum is the same."""


def loss_and_gradients(settings: dict[str, Any], tp: Axis, split: tuple[int, ...], **spec: Any) -> dict[str, Tensor]:
    """Loss and accumulated gradients of the same sequences, cut into micro-batches."""
    stage = make_stage(tiny_model(**settings), tp=tp, seed=11, **spec)
    total, first = torch.zeros((), dtype=torch.float64), 0
    for count in split:
        loss = run_stage(stage, make_batch(first, count))
        loss.backward()
        total += loss.detach()
        first += count
    return {"loss": total, **gradients(stage)}


def compare_layouts() -> list[str]:
    """Every tensor that differs between this world's layouts and one process with one micro-batch."""
    tp = tensor_axis() if dist.get_world_size() > 1 else SINGLE
    wrong = []
    for name, settings in MODELS.items():
        truth = loss_and_gradients(settings, SINGLE, SPLITS[0])
        plain = loss_and_gradients({**settings, "dropout": 0.0, "attention_dropout": 0.0}, SINGLE, SPLITS[0])
        assert abs(truth["loss"] - plain["loss"]) > 0.1, "dropout did nothing"
        own = {row.name: row.local(tp.size, tp.rank).slices for row in weight_table(tiny_model(**settings)).values()}
        for split in SPLITS[: 1 if name == "latents" else 5 if tp.size == 1 else 2]:
            for recompute in ("none", "selective", "full"):
                for sequence_parallel in (False, True) if tp.size > 1 else (False,):
                    options = {"recompute": recompute, "sequence_parallel": sequence_parallel}
                    found = loss_and_gradients(settings, tp, split, **options)
                    for key, value in found.items():
                        error = difference(value, truth[key][own[key]] if key in own else truth[key])
                        if error > FLOAT64_TOLERANCE:
                            wrong.append(f"{name}, {split}, {options}, rank {tp.rank} of {tp.size}: {key} {error:.1e}")
    return wrong


def test_splits_into_micro_batches_agree():
    """Loss and all gradients with dropout are the same for any split into micro-batches, which is also any dp, with
    and without recomputation, in float64."""
    assert run_ranks(compare_layouts, 1) == [[]]


def test_tensor_parallel_ranks_agree():
    """The same at tp 2 and tp 4, with and without sequence parallelism, against one process."""
    for world_size in (2, 4):
        wrong = [line for lines in run_ranks(compare_layouts, world_size) for line in lines]
        assert not wrong, "\n".join(wrong)


def test_evaluation_drops_nothing():
    """In evaluation the loss is that of the model without dropout."""
    losses = []
    for settings in ({"dropout": 0.2, "attention_dropout": 0.2}, {}):
        stage = make_stage(tiny_model(**settings)).eval()
        losses.append(run_stage(stage, make_batch()).item())
    assert losses[0] == losses[1]


def evaluate_layouts(layouts: list[dict[str, Any]]) -> list[list[float]]:
    """Losses of an evaluation with a dropout rate and without, each after a training step without learning."""
    losses = []
    for layout in layouts:
        pair = []
        for rate in (0.2, 0.0):
            config = tiny_config(**layout, model={"dropout": rate}, optimizer={"weight_decay": 0.0})
            plan = make_plan(config, dist.get_world_size())
            axes = connect(Mesh(plan.pp, plan.dp, plan.cp, plan.tp), dist.get_rank())
            engine = build_engine(config, plan, axes, torch.device("cpu"), FreshWeights(plan.model, 1))
            batches = [make_batch(2 * number) for number in range(plan.grad_accum_steps)]
            engine.train_step(batches, lr=0.0)
            pair.append(engine.eval_step(batches)[0])
            engine.close()
        losses.append(pair)
    return losses


def test_engines_drop_nothing_in_evaluation():
    """An evaluation between training steps has the loss of a model without dropout, without and with a pipeline."""
    for losses in run_ranks(evaluate_layouts, 2, [{"parallel": {"dp": 2}}, {"parallel": {"pp": 2}}]):
        assert all(dropped == plain for dropped, plain in losses), losses


def test_seeds_drop_other_channels():
    """The seed of a run moves the masks; the same seed gives the same loss again."""
    losses = [run_stage(make_stage(tiny_model(dropout=0.2), seed=seed), make_batch()).item() for seed in (1, 1, 2)]
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]


LAYOUTS = {
    1: [{}, {"train": {"recompute": "full"}}, {"batch": {"micro_batch_size": 8}}, {"batch": {"micro_batch_size": 1}}],
    2: [
        {"parallel": {"dp": 2}},
        {
            "parallel": {"dp": 2, "zero_stage": 3, "engine": "deepspeed"},
            "train": {"recompute": "full"},
        },
        {"parallel": {"tp": 2}},
        {"parallel": {"tp": 2, "sequence_parallel": True}, "train": {"recompute": "selective"}},
        {"parallel": {"pp": 2}},
        {"parallel": {"pp": 2}, "train": {"recompute": "full"}},
        {"parallel": {"cp": 2}},
        {"parallel": {"cp": 2, "cp_kind": "ulysses"}, "train": {"recompute": "selective"}},
    ],
}


DROPPING = {"dropout": 0.2, "attention_dropout": 0.2}


def train_layouts(layouts: list[dict[str, Any]]) -> list[list[tuple[float, float]]]:
    return [train(tiny_config(**layout, model=DROPPING), 3) for layout in layouts]


def test_engines_agree():
    """Three steps of training with dropout have the same losses and gradient norms at dp 2, tp 2, pp 2, under ZeRO-3,
    with recomputation and with any micro-batch size."""
    curves = [*run_ranks(train_layouts, 1, LAYOUTS[1])[0]]
    for curves_of_rank in run_ranks(train_layouts, 2, LAYOUTS[2]):
        curves += curves_of_rank
    truth = torch.tensor(curves[0])
    worst = [(torch.tensor(curve) - truth).abs().max().item() for curve in curves]
    assert max(worst) < CURVE_TOLERANCE, worst
