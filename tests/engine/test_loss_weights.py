"""Loss weights of tokens: every layout trains by the mean of the losses by weight, as plain PyTorch does."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megalite.config.plan import make_plan
from megalite.data.loader import Batch
from megalite.engine.protocol import LossSum
from megalite.optim.schedules import learning_rate
from tests.engine.test_layouts import FEW, FSDP2, LOSS_TOLERANCE, NORM_TOLERANCE, layout
from tests.kit.batches import step_batches
from tests.kit.reference import reference_training
from tests.kit.spawn import run_ranks
from tests.kit.train import Rank, start_rank, tiny_config

STEPS = 3
SMALL = 3
"""Of so many sequences in a row one has no label at all, so that some ranks have none in a micro-batch."""

MTP = {"model": {"mtp": {"num_layers": 2, "loss_weight": 0.3}, "tie_embeddings": False}}
EXPERTS = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 32}
MOE = {"model": {"moe": {**EXPERTS, "aux_loss": 0.02, "aux_loss_over": "sequence", "z_loss": 0.01}}}

CASES = {
    1: [layout(engine="deepspeed", zero_stage=2), layout(more=MOE)],
    2: [
        layout(dp=2, zero_stage=0),
        layout(dp=2, more={"batch": {"micro_batch_size": 1}}),
        layout(dp=2, zero_stage=3, engine="deepspeed"),
        layout(dp=2, **FSDP2),
        layout(tp=2, sequence_parallel=True, more=FEW),
        layout(pp=2, schedule="zb-v"),
        *(layout(cp=2, cp_kind=kind) for kind in ("allgather", "ring", "ulysses")),
        layout(cp=2, pad_tokens=True, more={"batch": {"micro_batch_size": 1, "seq_len": 15}}),
    ],
    4: [layout(dp=2, cp=2, zero_stage=3, engine="deepspeed"), layout(pp=2, tp=2, sequence_parallel=True, more=FEW)],
}


def weigh(mask: Tensor, indices: range) -> Tensor:
    """Weights of the labels of some sequences, fp32 `[sequences, tokens]`: far apart, and 0 where the mask is False."""
    rows = []
    for index, row in zip(indices, mask, strict=True):
        drawn = np.random.default_rng([7, index]).choice([0.0, 0.25, 1.0, 3.0], row.shape[0])
        rows.append(torch.from_numpy(drawn).float() * row * bool(index % SMALL))
    return torch.stack(rows)


def weighted(batch: Batch) -> Batch:
    """A micro-batch whose labels weigh so."""
    numbers = torch.unique_consecutive(batch.keys // batch.max_seqlen).tolist()
    weights = weigh(batch.loss_mask.view(len(numbers), -1), range(numbers[0], numbers[-1] + 1)).flatten()
    return replace(batch, weights=weights, loss_mask=weights > 0)


def batches_of(rank: Rank, step: int) -> list[Batch]:
    batch = rank.config.batch
    sizes = {"global_batch_size": batch.global_batch_size, "micro_batch_size": batch.micro_batch_size}
    places = {"dp": rank.plan.dp, "dp_rank": rank.axes.batch.rank}
    shapes = {"seq_len": batch.seq_len, "vocab_size": rank.plan.model.vocab_size}
    return [weighted(each) for each in step_batches(step, **sizes, **places, **shapes)]


Found = tuple[list[tuple[float, float]], list[LossSum], Any]


def run(cases: list[dict[str, Any]]) -> list[Found]:
    """Of each case: the curve, the sums of forward passes over the same batches before it, a step without labels."""
    found = []
    for case in cases:
        rank = start_rank(tiny_config(**case))
        sums = [rank.engine.eval_step(batches_of(rank, step)) for step in range(2)]
        curve = []
        for step in range(STEPS):
            lr = learning_rate(step + 1, rank.plan.total_steps, rank.config.optimizer, rank.config.schedule)
            result = rank.engine.train_step(batches_of(rank, step), lr)
            curve.append((result.loss, result.grad_norm))
        empty = [
            replace(each, weights=each.weights * 0, loss_mask=each.weights < 0) for each in batches_of(rank, STEPS)
        ]
        nothing = rank.engine.train_step(empty, 1e-3)
        rank.engine.close()
        found.append((curve, sums, (nothing.loss, nothing.num_tokens, nothing.skipped)))
    return found


@pytest.mark.parametrize("world_size", CASES)
def test_every_layout_is_the_weighted_mean(world_size):
    """Loss and gradient norm over clipped steps against transformers and torch's cross-entropy with the weights, some
    sequences without any label; forward passes add up the same; a step without labels changes nothing, and has no
    loss."""
    cases = CASES[world_size]
    ranks = run_ranks(run, world_size, cases)
    for number, case in enumerate(cases):
        config = tiny_config(**case)
        expected = reference_training(config, make_plan(config, world_size).model, STEPS, weigh=weigh)
        for own in ranks:
            curve, sums, (loss, num_tokens, skipped) = own[number]
            for (mean, norm), (true_mean, true_norm) in zip(curve, expected, strict=True):
                assert mean == pytest.approx(true_mean, abs=LOSS_TOLERANCE), case
                assert norm == pytest.approx(true_norm, rel=NORM_TOLERANCE), case
            assert sums[0].total / sums[0].weight == pytest.approx(expected[0][0], abs=LOSS_TOLERANCE)
            assert sums == ranks[0][number][1], "the same on every rank"
            assert math.isnan(loss), case
            assert (num_tokens, skipped) == (0, True)


def further(parallel: dict[str, Any]) -> list[tuple[float, float, float]]:
    """Of a model that predicts further ahead: the loss, the norm, the first of the further losses."""
    rank = start_rank(tiny_config(**layout(**parallel, more=MTP)))
    found = []
    for step in range(2):
        result = rank.engine.train_step(batches_of(rank, step), 1e-3)
        found.append((result.loss, result.grad_norm, *result.further))
    rank.engine.close()
    return found


def test_predictions_further_ahead_are_weighed_too():
    """The losses of further predictions weigh the label further ahead, in one process and over two cp ranks."""
    (alone,) = run_ranks(further, 1, {})
    for other in run_ranks(further, 2, {"cp": 2}):
        assert np.allclose(alone, other, rtol=NORM_TOLERANCE, atol=LOSS_TOLERANCE)


def test_weights_of_1_are_no_weights():
    """Bit by bit: a mean by equal weights is the plain mean."""

    (ones, plain) = run_ranks(with_ones, 1)[0]
    assert ones == plain


def with_ones() -> list[list[tuple[float, float]]]:
    curves = []
    for has_weights in (True, False):
        rank = start_rank(tiny_config(**layout()))
        curve = []
        for step in range(2):
            batches = [replace(each, weights=None) for each in batches_of(rank, step)]
            if has_weights:
                batches = [replace(each, weights=each.loss_mask.float()) for each in batches]
            result = rank.engine.train_step(batches, 1e-3)
            curve.append((result.loss, result.grad_norm))
        rank.engine.close()
        curves.append(curve)
    return curves
