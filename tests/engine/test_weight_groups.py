"""Groups of weights, whose rule, rate, decay, threshold and schedule are their own, train alike in every layout."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from megalite.layers.weight_gradients import ProductGradient
from tests.kit.spawn import run_ranks
from tests.kit.train import start_rank, tiny_config, train

STEPS = 8

TOLERANCE = 2e-5
"""Of losses near 4.6 and norms near 1: fp32 sums in another order."""

GROUPS = [
    {"match": "blocks.0.attention.[qk].*", "lr_scale": 0.5, "weight_decay": 0.3, "clip_threshold": 0.05},
    {"match": ["blocks.1.attention.v.*", "blocks.1.mlp.gate.weight", "final_norm.*"], "frozen": True},
    {"match": "blocks.1.*", "optimizer": "muon", "clip_threshold": 0.1},
    {"match": "embedding.*", "schedule": {"name": "linear", "warmup_steps": 2}},
]
DECAY = {"kind": "coupled", "end_scale": 0.1, "follows_rate": True, "layer_factor": 0.7}

LAYOUTS = {
    2: [
        {"tp": 2},
        {"dp": 2, "zero_stage": 0},
        {"dp": 2},
        {"dp": 2, "engine": "deepspeed"},
        {"dp": 2, "zero_stage": 2},
        {"dp": 2, "zero_stage": 3, "engine": "deepspeed"},
        {"dp": 2, "zero_stage": 3, "engine": "fsdp2"},
        {"pp": 2},
    ],
    4: [{"tp": 2, "dp": 2, "sequence_parallel": True}, {"pp": 2, "dp": 2}],
}


def sections(**parallel: Any) -> dict[str, Any]:
    """Of a tiny run, with clipping by group."""
    optimizer = {"groups": GROUPS, "decay": DECAY, "clip": {"by": "group", "threshold": 0.3}}
    few = {"micro_batch_size": min(4, 8 // parallel.get("dp", 1))}
    model = {"num_layers": 2, "tie_embeddings": True}
    return {"parallel": {"zero_stage": 1, **parallel}, "optimizer": optimizer, "model": model, "batch": few}


def curves(cases: list[dict[str, Any]]) -> list[list[tuple[float, float]]]:
    return [train(tiny_config(**each), STEPS) for each in cases]


def test_every_layout_trains_like_one_process():
    """Loss and norm of each step. The tied embedding, with its own schedule, lies on both ends of a pipeline."""
    (truth,) = run_ranks(curves, 1, [sections(zero_stage=0)])[0]
    for world_size, layouts in LAYOUTS.items():
        found = run_ranks(curves, world_size, [sections(**layout) for layout in layouts])
        for rank in found:
            for layout, curve in zip(layouts, rank, strict=True):
                off = np.abs(np.array(curve) - np.array(truth)).max()
                assert off <= TOLERANCE, (layout, off)


WHOLE = {"groups": [{"match": ["embedding.*", "blocks.0.*", "head.*"], "frozen": True}]}
FSDP2 = {"dp": 2, "zero_stage": 3, "engine": "fsdp2"}
STILL = [
    {"parallel": {"dp": 2}},
    {"parallel": {"dp": 2, "zero_stage": 3, "engine": "deepspeed"}},
    {"parallel": FSDP2},
    {"parallel": FSDP2, "train": {"recompute": "full"}},
    {"parallel": {"pp": 2}},
    {"parallel": {"pp": 2, "schedule": "interleaved", "chunks": 2}},
    {"parallel": {"pp": 2, "schedule": "zb-v", "chunks": 2}},
    {"parallel": {"tp": 2}},
]


def still(**others: Any) -> dict[str, Any]:
    """Sections of a tiny run whose first block, table and head stay as they are: nothing before the second block has a
    gradient, and the first chunk of a pipeline that takes turns nothing to go back through."""
    batch = {"micro_batch_size": min(4, 8 // others.get("parallel", {}).get("dp", 1))}
    return {"optimizer": WHOLE, "model": {"num_layers": 4, "tie_embeddings": False}, "batch": batch, **others}


def test_whole_blocks_stay_as_they_are():
    """The same curve as one process has."""
    (truth,) = run_ranks(curves, 1, [still()])[0]
    for rank in run_ranks(curves, 2, [still(**each) for each in STILL]):
        for case, curve in zip(STILL, rank, strict=True):
            off = np.abs(np.array(curve) - np.array(truth)).max()
            assert off <= TOLERANCE, (case, off)


def one_step(frozen: list[list[str]]) -> list[tuple[float, dict[str, float], int]]:
    """The gradient norm of the first step, how far each weight moves in it, and of how many a product is made."""
    found, made, begin = [], [0], ProductGradient.begin

    def counted(gradient: ProductGradient, total: torch.Tensor) -> None:
        made[0] += 1
        begin(gradient, total)

    ProductGradient.begin = counted
    for patterns in frozen:
        made[0] = 0
        own = [{"match": patterns, "frozen": True}] if patterns else []
        rank = start_rank(tiny_config(optimizer={"groups": own}, model={"num_layers": 2}))
        before = {each.local.weight.name: each.tensors["weight"].clone() for each in rank.engine.local_weights()}
        ((_, norm),) = rank.train(0, 1)
        after = {each.local.weight.name: each.tensors["weight"] for each in rank.engine.local_weights()}
        found.append((norm, {name: float((after[name] - w).abs().max()) for name, w in before.items()}, made[0]))
        rank.engine.close()
    return found


def test_frozen_weights_have_no_part():
    """They do not move by a bit, no product is made for them, and the norm is that of the others: squares of
    complementary halves add up to all."""
    one, other = ["blocks.*", "final_norm.weight"], ["embedding.*", "head.*"]
    (whole, moved, products), (norm, few, of_few), (rest, many, _) = run_ranks(one_step, 1, [[], one, other])[0]
    assert all(moved.values())
    assert products - of_few == 2 * 4, "qkv, o, gate with up and down of two blocks"
    assert {name for name, far in few.items() if not far} == {n for n in few if n.startswith(("blocks.", "final_norm"))}
    assert {name for name, far in many.items() if not far} == {"embedding.weight", "head.weight"}
    assert math.isclose(math.hypot(norm, rest), whole, rel_tol=1e-5)
    assert torch.isfinite(torch.tensor([norm, rest])).all()
