"""Weights that live in bf16 alone: every optimizer and layout rounds alike, restarts are bit-equal, no copy in fp32 is
kept, and a run learns as with fp32 masters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.optim import rounding
from tests.kit.spawn import run_ranks
from tests.kit.train import Rank, start_rank, tiny_config

STEPS = 6
LR = {"adamw": 2e-3, "adamw8bit": 2e-3, "lion": 5e-4, "adafactor": 2e-3, "muon": 2e-3, "sgd": 0.05}
LOSS_TOLERANCE = 1e-3
"""Of a loss near 4.6: bf16 sums in another order, and rounded weights."""

EQUAL_SHARE = {"adafactor": 0.85, "muon": 0.85}
"""Of all weights after a step, at least; 0.99 for the others. These two mix each number with its row and column."""

LAYOUTS: list[dict[str, Any]] = [
    {"dp": 2, "zero_stage": 2},
    {"dp": 2, "zero_stage": 3, "engine": "deepspeed"},
    {"tp": 2, "zero_stage": 2},
    {"tp": 2, "zero_stage": 3, "engine": "deepspeed", "sequence_parallel": True},
]

Curve = list[float]
Parts = dict[tuple[str, tuple[int, ...]], Tensor]


def case(name: str, master: str = "bf16", **parallel: Any) -> dict[str, Any]:
    """Sections of a tiny run."""
    return {
        "parallel": {"zero_stage": 2, **parallel},
        "precision": {"dtype": "bf16", "master_dtype": master},
        "optimizer": {"name": name, "lr": LR[name]},
        "model": {"num_layers": 2},
        "batch": {"micro_batch_size": 4},
    }


def losses(rank: Rank, first: int, last: int) -> Curve:
    return [loss for loss, _ in rank.train(first, last)]


def masters(rank: Rank) -> Parts:
    """This tp rank's, by canonical name and place."""
    return {
        (state.local.weight.name, state.local.rectangle.start): state.tensors["weight"].clone()
        for state in rank.engine.local_weights()
    }


def runs(cases: list[dict[str, Any]], steps: int = STEPS, seed: int | None = None) -> list[tuple[Curve, Parts]]:
    """Losses of each case, and its weights after the first step; a seed is one of the rounding alone."""
    found = []
    for sections in cases:
        rank = start_rank(tiny_config(**sections))
        if seed is not None:
            rank.engine._state.optimizer._seed = seed
        curve = losses(rank, 0, 1)
        after_one = masters(rank)
        found.append((curve + losses(rank, 1, steps), after_one))
        rank.engine.close()
    return found


def whole(ranks: list[Parts]) -> Tensor:
    """All numbers of the model, weight by weight, from the parts of all ranks; what several have is equal."""
    pieces: dict[str, dict[tuple[int, ...], Tensor]] = {}
    for rank in ranks:
        for (name, start), tensor in rank.items():
            former = pieces.setdefault(name, {}).setdefault(start, tensor)
            assert torch.equal(former, tensor), f"copies of {name} differ"
    joined = []
    for by_start in pieces.values():
        starts = sorted(by_start)
        dim = next((d for d in range(len(starts[0])) if starts[0][d] != starts[-1][d]), 0)
        joined.append(torch.cat([by_start[start] for start in starts], dim=dim).view(-1))
    return torch.cat(joined)


def share_equal(one: Tensor, other: Tensor) -> float:
    return float((one == other).float().mean())


def off(one: Curve, other: Curve) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def test_every_optimizer_and_layout_rounds_alike():
    """Against one process: losses, and how many weights are equal after a step. Those that are not have a gradient
    that bf16's sums, in another order, have made another; rounded independently, half of the weights would differ."""
    alone = [case(name) for name in LR]
    truth = dict(zip(LR, run_ranks(runs, 1, alone)[0], strict=True))
    exact = dict(zip(LR, run_ranks(runs, 1, [case(name, "fp32") for name in LR])[0], strict=True))
    reseeded = dict(zip(LR, run_ranks(runs, 1, alone, 1, 99)[0], strict=True))
    cases = [(name, layout) for name in LR for layout in LAYOUTS]
    ranks = run_ranks(runs, 2, [case(name, **layout) for name, layout in cases])
    complaints = []
    for number, (name, layout) in enumerate(cases):
        curve, weights = ranks[0][number][0], whole([rank[number][1] for rank in ranks])
        first = whole([truth[name][1]])
        share, by_chance = share_equal(weights, first), share_equal(whole([reseeded[name][1]]), first)
        distances = [off(curve, other[name][0]) for other in (truth, exact)]
        if share < EQUAL_SHARE.get(name, 0.99) or by_chance > 0.7 or max(distances) > LOSS_TOLERANCE:
            complaints.append(f"{name} {layout}: {share:.3f} equal, {by_chance:.3f} by chance, losses off {distances}")
    assert not complaints, "\n".join(complaints)


def formats(stages: list[int]) -> list[tuple[bool, bool, int]]:
    """Of each ZeRO stage: whether masters are bf16, and the model's own memory, and bytes of a number of a moment."""
    found = []
    for stage in stages:
        rank = start_rank(tiny_config(**case("adamw", zero_stage=stage)))
        rank.train(0, 1)
        flat = rank.engine._state._partition.flat_weights()
        own = {p.ds_tensor.untyped_storage().data_ptr() for p in rank.engine.stage.parameters() if stage == 3}
        is_shared = {tensor.untyped_storage().data_ptr() for tensor in flat} == own
        is_bf16 = all(tensor.dtype == torch.bfloat16 for tensor in flat)
        found.append((is_bf16, is_shared, rank.engine.slices()[0].tensors["exp_avg"].element_size()))
        rank.engine.close()
    return found


def test_there_is_no_copy_in_fp32():
    """Masters are bf16, at stage 3 the very memory of the model's weights; moments are fp32."""
    assert run_ranks(formats, 1, [2, 3])[0] == [(True, False, 4), (True, True, 4)]


def save_in_the_middle(root: Path, cases: list[dict[str, Any]]) -> list[Curve]:
    """Curves of the second half, with a checkpoint before it."""
    found = []
    for number, sections in enumerate(cases):
        rank = start_rank(tiny_config(**sections))
        rank.train(0, STEPS // 2)
        rank.save(root / str(number), STEPS // 2)
        found.append(losses(rank, STEPS // 2, STEPS))
        rank.engine.close()
    return found


def go_on(root: Path, cases: list[dict[str, Any]]) -> list[Curve]:
    """Curves from these checkpoints to the end."""
    found = []
    for number, sections in enumerate(cases):
        rank = start_rank(tiny_config(**sections), root / str(number) / f"step-{STEPS // 2:07d}")
        found.append(losses(rank, STEPS // 2, STEPS))
        rank.engine.close()
    return found


def test_restart_is_bit_equal(tmp_path):
    """Every optimizer at stage 3 over two ranks repeats the rest bit by bit, and so does stage 2, whose arithmetic is
    the same; one process, and fp32 masters, have it to rounding."""
    layout = [case(name, dp=2, zero_stage=3, engine="deepspeed") for name in LR]
    wanted = run_ranks(save_in_the_middle, 2, tmp_path, layout)[0]
    assert run_ranks(go_on, 2, tmp_path, layout)[0] == wanted
    assert run_ranks(go_on, 2, tmp_path, [case(name, dp=2) for name in LR])[0] == wanted
    for master in ("bf16", "fp32"):
        found = run_ranks(go_on, 1, tmp_path, [case(name, master) for name in LR])[0]
        assert max(map(off, found, wanted)) <= LOSS_TOLERANCE, master


REPEATS = 60


def learn_by_heart(kinds: list[str]) -> list[tuple[float, float]]:
    """First and last loss of many small updates on one batch."""
    found = []
    for kind in kinds:
        if kind == "nearest":
            rounding.round_by_chance = lambda x, keys, seed: x.bfloat16()
        sections = case("adamw", "fp32" if kind == "fp32" else "bf16")
        sections["model"] |= {"init_std": 0.2}
        sections["optimizer"] = {"lr": 1e-4, "weight_decay": 0.0}
        sections["schedule"] = {"name": "constant", "warmup_steps": 0}
        rank = start_rank(tiny_config(**sections))
        curve = [losses(rank, 0, 1)[0] for _ in range(REPEATS)]
        found.append((curve[0], curve[-1]))
        rank.engine.close()
    return found


def test_small_updates_train():
    """At updates of a 2000th of the weights rounding to the nearest learns little; by chance the loss falls as with
    fp32 masters."""
    fp32, chance, nearest = (
        first - last for first, last in run_ranks(learn_by_heart, 1, ["fp32", "bf16", "nearest"])[0]
    )
    print(fp32, chance, nearest)
    assert chance == pytest.approx(fp32, rel=0.05)
    assert nearest < 0.8 * fp32
