"""Averages of weights in every layout: a run trains at y as one process does, is evaluated at x, and goes on at y as if
nobody had looked."""

from __future__ import annotations

from typing import Any

import torch

from tests.kit.batches import step_batches
from tests.kit.spawn import run_ranks
from tests.kit.train import Rank, start_rank, tiny_config

STEPS, LOOKS = 6, (3, 6)
"""Behind which of them a run is evaluated."""

TOLERANCES = {"fp32": 5e-6, "bf16": 2e-3, "bf16 alone": 2e-3}
"""Of losses near 4.6: sums in another order, and products that are rounded."""

WARMUP = {"name": "constant", "warmup_steps": 3}
GROUPS = [
    {"match": "embedding.*", "lr_scale": 0.5, "schedule": {"name": "constant", "warmup_steps": 5}},
    {"match": "blocks.0.attention.q.weight", "frozen": True},
    {"match": "*norm.weight", "optimizer": "sgd", "lr_scale": 5.0},
]

LAYOUTS: dict[str, dict[int, list[dict[str, Any]]]] = {
    "fp32": {
        2: [
            {"tp": 2},
            {"dp": 2},
            {"dp": 2, "zero_stage": 0},
            {"pp": 2},
            {"dp": 2, "zero_stage": 3, "engine": "fsdp2"},
            {"dp": 2, "engine": "deepspeed"},
            {"dp": 2, "zero_stage": 2},
            {"dp": 2, "zero_stage": 3, "engine": "deepspeed"},
        ],
        4: [
            {"tp": 2, "dp": 2},
            {"pp": 2, "dp": 2},
            {"tp": 2, "dp": 2, "zero_stage": 3, "engine": "fsdp2"},
        ],
    },
    "bf16": {2: [{"dp": 2}, {"dp": 2, "zero_stage": 3, "engine": "fsdp2"}, {"dp": 2, "zero_stage": 2}]},
    "bf16 alone": {2: [{"dp": 2, "zero_stage": 3, "engine": "deepspeed"}]},
}
ALONE = {
    "fp32": {"zero_stage": 0},
    "bf16": {"zero_stage": 0},
    "bf16 alone": {"zero_stage": 3, "engine": "deepspeed"},
}
"""On one process, as what the others are compared with."""

Found = tuple[list[tuple[float, float]], list[float]]
"""Losses and norms of a run's steps, and the losses of its averages."""


def sections(dtype: str, **parallel: Any) -> dict[str, Any]:
    """Of a tiny run."""
    precision = {"dtype": dtype.split()[0], "master_dtype": "bf16" if dtype == "bf16 alone" else "fp32"}
    return {
        "parallel": {"zero_stage": 1, **parallel},
        "optimizer": {"name": "schedule_free_adamw", "lr": 1e-2, "groups": GROUPS},
        "model": {"num_layers": 2, "tie_embeddings": True},
        "batch": {"micro_batch_size": min(4, 8 // parallel.get("dp", 1))},
        "schedule": WARMUP,
        "precision": precision,
    }


def evaluated(rank: Rank) -> float:
    """The loss of the averages on one batch, asked for twice; nothing else has changed, to the bit."""
    sizes = {"global_batch_size": 8, "micro_batch_size": rank.config.batch.micro_batch_size, "dp": rank.plan.dp}
    batches = step_batches(99, **sizes, dp_rank=rank.axes.batch.rank, seq_len=16, vocab_size=101)
    before = bits(rank)
    with rank.engine.averaged_weights():
        first, second = (rank.engine.eval_step(batches) for _ in range(2))
    assert first == second
    assert_equal(bits(rank), before)
    return first.total / first.weight


def bits(rank: Rank) -> dict[str, torch.Tensor]:
    """Masters, state and weights that compute, of this rank."""
    found = {each.name: each.tensor.detach().clone() for each in rank.engine.held_weights()}
    for part in rank.engine.slices():
        for kind, tensor in part.tensors.items():
            found[f"{kind}/{part.local.weight.name}/{part.start}"] = tensor.clone()
    return found


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def trained(cases: list[dict[str, Any]]) -> list[Found]:
    """Each run, evaluated in between."""
    found = []
    for each in cases:
        rank, curve, losses = start_rank(tiny_config(**each)), [], []
        for step in range(STEPS):
            curve += rank.train(step, step + 1)
            losses += [evaluated(rank)] if step + 1 in LOOKS else []
        found.append((curve, losses))
        rank.engine.close()
    return found


def alone(each: dict[str, Any]) -> tuple[list[tuple[float, float]], float, float]:
    """A run that nobody evaluates in between; then the loss of its averages, and of these as anybody computes them."""
    rank = start_rank(tiny_config(**each))
    curve, loss = rank.train(0, STEPS), evaluated(rank)
    before, remembered = bits(rank), rank.engine.averaging()
    forget = rank.engine.hooks.vetoes.add(lambda loss, norm: "left out")
    rank.train(STEPS, STEPS + 1)
    forget()
    assert_equal(bits(rank), before)
    assert rank.engine.averaging() == remembered
    for part in rank.engine.slices():
        if "z_minus_x" in part.tensors:
            part.tensors["weight"].sub_(0.1 * part.tensors["z_minus_x"])
            part.tensors["z_minus_x"].zero_()
    return curve, loss, evaluated(rank)


def test_every_layout():
    """Losses of every step at y, and of the averages, as one process has them, with groups of other schedules and
    rules. A run that nobody has evaluated in between has the same steps, bit by bit; a step that is left out changes
    nothing."""
    names = list(LAYOUTS)
    truth = dict(zip(names, run_ranks(trained, 1, [sections(name, **ALONE[name]) for name in names])[0], strict=True))
    ((curve, loss, plainly),) = run_ranks(alone, 1, sections("fp32", zero_stage=0))
    assert (curve, loss) == (truth["fp32"][0], truth["fp32"][1][-1])
    assert abs(plainly - loss) < TOLERANCES["fp32"]
    complaints = []
    for size in (2, 4):
        cases = [(name, layout) for name in names for layout in LAYOUTS[name].get(size, ())]
        for rank in run_ranks(trained, size, [sections(name, **layout) for name, layout in cases]):
            for (name, layout), found in zip(cases, rank, strict=True):
                off = difference(found, truth[name])
                if not off <= TOLERANCES[name]:
                    complaints.append(f"{name} {layout}: off by {off:.1e}")
    assert not complaints, "\n".join(complaints)


def difference(found: Found, truth: Found) -> float:
    """The largest between two runs' losses, of steps and of averages."""
    steps = [abs(a - b) for (a, _), (b, _) in zip(found[0], truth[0], strict=True)]
    return max(*steps, *(abs(a - b) for a, b in zip(found[1], truth[1], strict=True)))
