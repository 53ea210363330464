"""Emulated FP4 in whole training steps: layouts, recomputation, resuming, blocks that keep their format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megalite.config.schema import Config
from megalite.planner.holdings import rounded_bytes_by_stage
from tests.kit.spawn import run_ranks
from tests.kit.train import start_rank, tiny_config, train
from tests.model.stages import make_batch, run_stage

STEPS, COMPARED = 4, 1
LAYOUT_TOLERANCE = 1e-4
"""Relative, of loss and gradient norm of the first step. Sums in another order differ by 1e-6, and now and then move a
number over a border; other blocks or chances move these numbers by 1e-2."""

MODEL = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "ffn_hidden_size": 128, "init_std": 0.2}
MLA = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
NVFP4 = {"format": "nvfp4"}
MXFP4 = {"format": "mxfp4", "forward": True, "hadamard_size": 32}


def fp4_config(fp4: dict[str, Any] | None, **sections: dict[str, Any]) -> Config:
    """A tiny run in FP4, or plain."""
    return tiny_config(
        model={**MODEL, **sections.pop("model", {})},
        precision={"fp4": fp4, **sections.pop("precision", {})},
        **sections,
    )


def curves(configs: list[Config]) -> list[list[tuple[float, float]]]:
    return [train(config, COMPARED) for config in configs]


def gap(one: list[tuple[float, float]], two: list[tuple[float, float]]) -> float:
    pairs = zip(one, two, strict=True)
    return max(abs(a - b) / b for left, right in pairs for a, b in zip(left, right, strict=True))


LAYOUTS = {
    "tp 2": {"tp": 2},
    "tp 2, sequence parallel": {"tp": 2, "sequence_parallel": True},
    "zero bubble": {"pp": 2, "schedule": "zb-h1"},
    "ZeRO-3": {"zero_stage": 3, "engine": "deepspeed"},
    "FSDP2": {"zero_stage": 3, "engine": "fsdp2"},
}
CASES = {
    "nvfp4": (fp4_config(NVFP4), ("tp 2, sequence parallel", "zero bubble", "ZeRO-3", "FSDP2")),
    "mxfp4": (fp4_config(MXFP4), ("tp 2",)),  # weights by chance too, other ones on each dp rank
    "latents": (fp4_config(NVFP4, model={"mla": MLA}), ("tp 2, sequence parallel",)),
}


def test_layouts_agree_and_recomputed_blocks_round_alike():
    """Losses and gradient norms of five layouts are those of one rank: tensors whose scale spans ranks, gradients that
    wait, weights that are gathered, latent attention. Full and selective recomputation and a part of the model in
    another format change what they should: nothing, and all."""
    kinds = [fp4_config(NVFP4, train={"recompute": kind}) for kind in ("full", "selective")]
    others = [fp4_config(None), fp4_config({**NVFP4, "keep_last_blocks": 0}), fp4_config({**NVFP4, "hadamard": "none"})]
    ones = run_ranks(curves, 1, [*(config for config, _ in CASES.values()), *kinds, *others])[0]
    truth = dict(zip(CASES, ones, strict=False))
    assert ones[len(CASES) : len(CASES) + 2] == [truth["nvfp4"], truth["nvfp4"]]
    assert min(gap(one, truth["nvfp4"]) for one in ones[len(CASES) + 2 :]) > 10 * LAYOUT_TOLERANCE
    made = {
        (case, name): Config(**{**config.model_dump(), "parallel": LAYOUTS[name]})
        for case, (config, names) in CASES.items()
        for name in names
    }
    found = run_ranks(curves, 2, list(made.values()))[0]
    gaps = {key: gap(curve, truth[key[0]]) for key, curve in zip(made, found, strict=True)}
    assert max(gaps.values()) < LAYOUT_TOLERANCE, gaps


def kept_bytes(configs: list[Config]) -> list[tuple[int, int]]:
    """Of rounded weights after a backward pass: there, and planned."""
    found = []
    for config in configs:
        rank = start_rank(config)
        stage = rank.engine.stage
        run_stage(stage, make_batch()).backward()
        kept = [tensor for layer in stage.precision.layers.values() for tensor in layer._kept.values()]
        found.append((sum(each.nbytes for each in kept), rounded_bytes_by_stage(config, rank.plan)[0]))
        stage.precision.end_step()
        assert not any(layer._kept for layer in stage.precision.layers.values())
    return found


def test_kept_weights_are_counted():
    """The plan's bytes are those that are there: one matrix for both passes, one of two, two."""
    rows = {**NVFP4, "square_weights": False}
    found = run_ranks(kept_bytes, 1, [fp4_config(NVFP4), fp4_config(MXFP4), fp4_config(rows)])[0]
    assert all(there == planned > 0 for there, planned in found)
    assert found[2][0] == 2 * found[0][0]


def leg(root: Path, config: Config, legs: list[tuple[int, int]]) -> list[tuple[float, float]]:
    """Go on from a checkpoint, if there is one for the step, train, and save; as often as there are legs."""
    curve = []
    for first, last in legs:
        folder = root / f"step-{first:07d}"
        rank = start_rank(config, folder if folder.is_dir() else None)
        curve += rank.train(first, last)
        rank.save(root, last)
        rank.engine.close()
    return curve


def test_resumed_runs_are_bit_equal(tmp_path):
    """A run in two halves has the losses of one in a piece: chances are functions of tokens and places, and nothing of
    them is in checkpoints."""
    config = fp4_config(MXFP4, precision={"dtype": "bf16"})
    whole = run_ranks(leg, 1, tmp_path / "whole", config, [(0, STEPS)])[0]
    halves = run_ranks(leg, 1, tmp_path / "halves", config, [(0, 2), (2, STEPS)])[0]
    assert whole == halves
    assert torch.tensor(whole).isfinite().all()
