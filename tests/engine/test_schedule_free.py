"""Averages of weights in every layout: a run trains at y as one process does, is evaluated at x, and goes on at y as if
nobody had looked."""

from __future__ import annotations

from typing import Any

import torch

from tests.kit.batches import step_batches
from tests.kit.spawn import run_ranks
from tests.kit.train import Rank, start_rank, tiny_config

STEPS, LOOKS = 6, (3, 5)
"""Behind which of them a run is evaluated, and behind the last."""

ROUNDING = 2e-5
"""Of losses near 4.6: fp32 sums in another order."""

BF16_ROUNDING = 5e-3
"""The same of products in bf16."""

WARMUP = {"name": "constant", "warmup_steps": 3}
GROUPS = [
    {"match": "embedding.*", "lr_scale": 0.5, "schedule": {"name": "constant", "warmup_steps": 5}},
    {"match": "blocks.0.attention.q.weight", "frozen": True},
    {"match": "*norm.weight", "optimizer": "sgd", "lr_scale": 5.0},
]

LAYOUTS: dict[int, list[dict[str, Any]]] = {
    2: [
        {"tp": 2},
        {"dp": 2},
        {"dp": 2, "zero_stage": 0},
        {"pp": 2},
        {"dp": 2, "zero_stage": 3, "engine": "fsdp2"},
        {"dp": 2, "zero_stage": 1, "engine": "deepspeed"},
        {"dp": 2, "zero_stage": 2},
        {"dp": 2, "zero_stage": 3},
    ],
    4: [
        {"tp": 2, "dp": 2},
        {"pp": 2, "dp": 2},
        {"tp": 2, "dp": 2, "zero_stage": 3, "engine": "fsdp2"},
    ],
}


def sections(dtype: str = "fp32", groups: Any = (), **parallel: Any) -> dict[str, Any]:
    """Of a tiny run."""
    optimizer = {"name": "schedule_free_adamw", "lr": 1e-2, "betas": [0.9, 0.95], "groups": list(groups)}
    model = {"num_layers": 2, "tie_embeddings": True}
    batch = {"micro_batch_size": min(4, 8 // parallel.get("dp", 1))}
    layout = {"zero_stage": 1, **parallel}
    return {
        "parallel": layout,
        "optimizer": optimizer,
        "model": model,
        "batch": batch,
        "schedule": WARMUP,
        "precision": {"dtype": dtype},
    }


def evaluated(rank: Rank) -> float:
    """The loss of the averages on one batch, asked for twice; nothing else has changed, to the bit."""
    sizes = {"global_batch_size": 8, "micro_batch_size": rank.config.batch.micro_batch_size, "dp": rank.plan.dp}
    batches = step_batches(99, **sizes, dp_rank=rank.axes.batch.rank, seq_len=16, vocab_size=101)
    before = bits(rank)
    with rank.engine.averaged_weights():
        first, second = (rank.engine.eval_step(batches) for _ in range(2))
    after = bits(rank)
    assert first == second
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    return first.total / first.weight


def bits(rank: Rank) -> dict[str, torch.Tensor]:
    """Masters, state and weights that compute, of this rank."""
    found = {each.name: each.tensor.detach().clone() for each in rank.engine.held_weights()}
    for part in rank.engine.slices():
        for kind, tensor in part.tensors.items():
            found[f"{kind}/{part.local.weight.name}/{part.start}"] = tensor.clone()
    return found


def trained(cases: list[dict[str, Any]], *, is_watched: bool) -> list[tuple[list[tuple[float, float]], list[float]]]:
    """Curve of each run, and the losses of its averages."""
    found = []
    for each in cases:
        rank, curve, losses = start_rank(tiny_config(**each)), [], []
        for step in range(STEPS):
            curve += rank.train(step, step + 1)
            if is_watched and step + 1 in (*LOOKS, STEPS):
                losses.append(evaluated(rank))
        found.append((curve, losses))
        rank.engine.close()
    return found


def watched(cases: list[dict[str, Any]]) -> list[tuple[list[tuple[float, float]], list[float]]]:
    return trained(cases, is_watched=True)


def unwatched(cases: list[dict[str, Any]]) -> list[tuple[list[tuple[float, float]], list[float]]]:
    return trained(cases, is_watched=False)


def differences(found: Any, truth: Any) -> float:
    """The largest difference between two runs' losses, of training and of averages."""
    pairs = [(a[0], b[0]) for a, b in zip(found[0], truth[0], strict=True)] + list(zip(found[1], truth[1], strict=True))
    return max(abs(a - b) for a, b in pairs)


def test_every_layout():
    """Losses of every step at y, and of the averages, as one process has them, plain and with groups of other
    schedules and rules; a run that nobody has evaluated in between has the same steps, bit by bit."""
    kinds = [("fp32", ()), ("fp32", GROUPS), ("bf16", ())]
    alone = [sections(dtype, groups, zero_stage=0) for dtype, groups in kinds]
    truth = dict(enumerate(run_ranks(watched, 1, alone)[0]))
    for number, (curve, _) in enumerate(run_ranks(unwatched, 1, alone)[0]):
        assert curve == truth[number][0]
    assert abs(truth[0][1][-1] - truth[1][1][-1]) > 100 * ROUNDING  # the groups do something
    complaints = []
    for size, layouts in LAYOUTS.items():
        cases = [(number, layout) for layout in layouts for number in range(len(kinds)) if number == 0 or size == 2]
        for rank in run_ranks(watched, size, [sections(*kinds[number], **layout) for number, layout in cases]):
            for (number, layout), found in zip(cases, rank, strict=True):
                off = differences(found, truth[number])
                if not off <= (BF16_ROUNDING if kinds[number][0] == "bf16" else ROUNDING):
                    complaints.append(f"{kinds[number]} {layout}: off by {off:.1e}")
    assert not complaints, "\n".join(complaints)
