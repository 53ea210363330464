"""Any layout to any layout, in linear time: what a layout loads and saves again is what it was given, bit for bit.

One reference checkpoint is loaded in every layout, saved from there, and compared with the reference. Where that holds
for A and for B, A to B is exact too, since both stand for the same tensors. That layouts also read each other's pieces
is `test_reshard`'s.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from megalite.checkpoint.reader import CheckpointReader
from megalite.engine import stage_state
from megalite.engine.parts import rectangles_of_slice
from tests.kit.spawn import run_ranks
from tests.kit.train import start_rank, tiny_config

SAVED_STEP, LAST_STEP = 2, 4
LOSS_TOLERANCE = 1e-5
"""fp32 sums in another order."""


def layout(micro_batch_size: int = 2, **parallel) -> dict[str, dict]:
    return {"parallel": {"zero_stage": 1, **parallel}, "batch": {"micro_batch_size": micro_batch_size}}


ONE = {"one": layout(zero_stage=0)}
LAYOUTS = {
    1: {
        "zero1": layout(8),
        "zero2": layout(1, zero_stage=2),
        "zero3": layout(4, zero_stage=3, engine="deepspeed"),
    },
    2: {
        "tp2": layout(tp=2),
        "tp2-sp-zero2": layout(1, tp=2, zero_stage=2, sequence_parallel=True),
        "tp2-zero0": layout(4, tp=2, zero_stage=0),
        "tp2-sp-zero3": layout(tp=2, zero_stage=3, engine="deepspeed", sequence_parallel=True),
        "dp2-zero0": layout(4, dp=2, zero_stage=0),
        "dp2-zero1": layout(dp=2),
        "dp2-zero2": layout(1, dp=2, zero_stage=2),
        "dp2-zero3": layout(4, dp=2, zero_stage=3, engine="deepspeed"),
        "dp2-fsdp2": layout(4, dp=2, zero_stage=3, engine="fsdp2"),
        "pp2-zero0": layout(pp=2, zero_stage=0),
        "pp2-zero1": layout(1, pp=2),
        "pp2-4+0": layout(4, pp=2, blocks_per_stage=[4, 0]),
        "pp2-interleaved-zero0": layout(pp=2, schedule="interleaved", zero_stage=0),
        "pp2-zb-v": layout(1, pp=2, schedule="zb-v"),
        "cp2-zero0": layout(cp=2, zero_stage=0),
        "cp2-zero1": layout(4, cp=2, cp_kind="ulysses"),
        "cp2-zero3": layout(cp=2, zero_stage=3, engine="deepspeed"),
    },
    4: {
        "tp4-sp": layout(4, tp=4, sequence_parallel=True),
        "tp4-zero3": layout(tp=4, zero_stage=3, engine="deepspeed"),
        "dp4": layout(dp=4),
        "dp4-zero3": layout(1, dp=4, zero_stage=3, engine="deepspeed"),
        "dp4-zero0": layout(dp=4, zero_stage=0),
        "tp2-dp2-zero2-sp": layout(1, tp=2, dp=2, zero_stage=2, sequence_parallel=True),
        "tp2-dp2-fsdp2": layout(tp=2, dp=2, zero_stage=3, engine="fsdp2"),
        "dp4-fsdp2-hybrid": layout(dp=4, zero_stage=3, engine="fsdp2", dp_replicate=2),
        "tp2-dp2-zero3": layout(tp=2, dp=2, zero_stage=3, engine="deepspeed"),
        "pp2-tp2-sp": layout(1, pp=2, tp=2, sequence_parallel=True),
        "pp2-dp2": layout(pp=2, dp=2),
        "pp2-dp2-zero0": layout(1, pp=2, dp=2, zero_stage=0),
        "pp4": layout(pp=4),
        "pp2-dp2-dualpipe-v": layout(1, pp=2, dp=2, schedule="dualpipe-v"),
        "cp2-dp2": layout(cp=2, dp=2),
        "cp2-tp2-sp-zero2": layout(cp=2, tp=2, zero_stage=2, sequence_parallel=True),
        "pp2-cp2": layout(1, pp=2, cp=2),
    },
}
OF_EXPERTS = {
    1: {"experts": layout(8), "experts-zero3": layout(4, zero_stage=3, engine="deepspeed")},
    2: {
        "ep2": layout(dp=2, ep=2),
        "ep2-zero0": layout(4, dp=2, ep=2, zero_stage=0),
        "ep2-fsdp2": layout(dp=2, ep=2, zero_stage=3, engine="fsdp2"),
        "ep2-cp2": layout(cp=2, ep=2),
        "dp2": layout(1, dp=2),
        "experts-tp2-sp": layout(tp=2, sequence_parallel=True),
    },
    4: {
        "ep4": layout(dp=4, ep=4),
        "dp4-ep2": layout(1, dp=4, ep=2),
        "dp4-ep2-fsdp2": layout(1, dp=4, ep=2, zero_stage=3, engine="fsdp2"),
        "dp4-ep2-zero0": layout(1, dp=4, ep=2, zero_stage=0),
        "dp2-ep2-tp2": layout(dp=2, ep=2, tp=2),
        "dp2-ep2-pp2": layout(1, dp=2, ep=2, pp=2, schedule="zb-v"),
    },
}
"""Layouts of models with experts."""

LATENTS = {
    "norm_eps": 1e-6,
    "rope": {"interleaved": True},
    "mla": {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10},
}

BIASED = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 32, "bias_rate": 0.01, "aux_loss": 0.02, "first_dense": 1}

GPT_OSS = {
    "activation": "swiglu_clamped",
    "bias": "all",
    "attention_sinks": True,
    "moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 32, "logit_bias": True},
}

FURTHER = {"moe": BIASED, "mtp": {"num_layers": 2}}
OF_PREDICTIONS = {
    1: {"experts": layout(8), "experts-zero3": layout(4, zero_stage=3, engine="deepspeed")},
    2: {
        "ep2": layout(dp=2, ep=2),
        "experts-tp2-sp": layout(tp=2, sequence_parallel=True),
        "pp2-zb-v": layout(1, pp=2, schedule="zb-v"),
        "pp2-zb-v-zero0": layout(1, pp=2, schedule="zb-v", zero_stage=0),
        "pp2": layout(2, pp=2),
        "pp2-zero0": layout(2, pp=2, zero_stage=0),
    },
}
"""Of models that predict further."""

WHEN_TIED = (
    *("zero3", "tp2", "dp2-zero2", "pp2-zero0", "pp2-zero1", "tp2-dp2-zero3", "pp2-tp2-sp", "pp2-dp2", "pp4"),
    *("pp2-zb-v", "pp2-dp2-dualpipe-v"),
)
"""A tied matrix differs in who holds the head."""

WITH_SHARED_HEADS = ("tp2", "tp2-sp-zero3", "tp4-sp", "cp2-tp2-sp-zero2")
"""One key and value head for all queries is cut where others are whole."""

MODELS: dict[str, tuple[dict, tuple[str, ...]]] = {
    "untied": ({}, tuple(name for cases in LAYOUTS.values() for name in cases)),
    "tied": ({"tie_embeddings": True}, WHEN_TIED),
    "one kv head": ({"num_kv_heads": 1}, WITH_SHARED_HEADS),
    "latents": (LATENTS, ("one", "zero3", *WITH_SHARED_HEADS)),
    "gpt-oss": (GPT_OSS, tuple(name for cases in OF_EXPERTS.values() for name in cases)),
    "further": (FURTHER, tuple(name for cases in OF_PREDICTIONS.values() for name in cases)),
    "experts": ({"moe": BIASED}, tuple(name for cases in OF_EXPERTS.values() for name in cases)),
}
"""Settings of the model, and layouts that are worth trying with it."""

UNEVEN = {
    "dp3-zero1": {"parallel": {"dp": 3, "zero_stage": 1}},
    "dp3-zero2": {"parallel": {"dp": 3, "zero_stage": 2}},
    "dp3-zero3": {"parallel": {"dp": 3, "zero_stage": 3, "engine": "deepspeed"}},
    "dp3-zero0": {"parallel": {"dp": 3, "zero_stage": 0}},
    "dp3-fsdp2": {"parallel": {"dp": 3, "zero_stage": 3, "engine": "fsdp2"}},
    "pp3": {"parallel": {"pp": 3, "zero_stage": 1}},
}
"""Slices that end inside rows; their batches are other ones, so only the state is compared."""


def _layouts_of(settings: dict) -> dict[int, dict[str, dict]]:
    return OF_PREDICTIONS if "mtp" in settings else OF_EXPERTS if "moe" in settings else LAYOUTS


def make_reference(folder: Path, sections: dict) -> list[tuple[float, float]]:
    """Save one rank's state with moments that are not zero; return the losses and norms of the next steps."""
    rank = start_rank(tiny_config(**ONE["one"], **sections))
    rank.train(0, SAVED_STEP)
    rank.save(folder / "reference", SAVED_STEP)
    return rank.train(SAVED_STEP, LAST_STEP)


def load_and_save(
    folder: Path, cases: dict[str, dict], sections: dict, max_slices: int = stage_state.MAX_SLICES, num_steps: int = 2
) -> dict[str, list[tuple[float, float]]]:
    """In every layout: load the reference, save it again, go on for some steps."""
    stage_state.MAX_SLICES = max_slices
    curves = {}
    for name, case in cases.items():
        rank = start_rank(tiny_config(**case, **sections), folder / "reference" / f"step-{SAVED_STEP:07d}")
        rank.save(folder / name, SAVED_STEP)
        curves[name] = rank.train(SAVED_STEP, SAVED_STEP + num_steps)
        rank.engine.close()
    return curves


def differences(folder: Path, names: list[str]) -> list[str]:
    """What the layouts' checkpoints have that the reference has not, and the other way round."""
    reference = CheckpointReader(folder / "reference" / f"step-{SAVED_STEP:07d}")
    complaints = []
    for name in names:
        saved = CheckpointReader(folder / name / f"step-{SAVED_STEP:07d}")
        if saved.manifest.tensors.keys() != reference.manifest.tensors.keys():
            complaints.append(f"{name}: other tensors")
            continue
        for tensor in reference.manifest.tensors:
            pairs = zip(reference.slabs(tensor), saved.slabs(tensor), strict=True)
            if not all(torch.equal(want, got) for want, got in pairs):
                complaints.append(f"{name}: {tensor} changed")
        complaints += saved.verify()
    return complaints


@pytest.mark.parametrize("model", MODELS)
def test_every_layout_keeps_every_bit(tmp_path, model):
    """Loaded and saved again in every layout: weights and both moments bit-equal, the next losses to 1e-5.

    The vocabulary of 101 is padded to 102 under tp 2 and to 104 under tp 4.
    """
    settings, worth_trying = MODELS[model]
    sections = {"model": settings}
    truth = run_ranks(make_reference, 1, tmp_path, sections)[0]
    complaints, names = [], []
    for size, cases in _layouts_of(settings).items():
        chosen = {name: case for name, case in cases.items() if name in worth_trying}
        curves = run_ranks(load_and_save, size, tmp_path, chosen, sections, timeout_seconds=400)[0]
        names += chosen
        for name, curve in curves.items():
            worst = max(abs(loss - want) for (loss, _), (want, _) in zip(curve, truth, strict=True))
            if not worst <= LOSS_TOLERANCE:
                complaints.append(f"{name}: losses differ by {worst:.1e}")
    complaints += differences(tmp_path, names)
    assert not complaints, "\n".join(complaints)


def test_uneven_slices(tmp_path):
    """Three dp ranks own slices that begin and end inside rows, three stages uneven runs of layers: still exact."""
    run_ranks(make_reference, 1, tmp_path, {})
    sections = {"batch": {"global_batch_size": 12}}
    run_ranks(load_and_save, 3, tmp_path, UNEVEN, sections, stage_state.MAX_SLICES, 0)
    assert differences(tmp_path, list(UNEVEN)) == []
    pieces = CheckpointReader(tmp_path / "dp3-zero1" / f"step-{SAVED_STEP:07d}").manifest.tensors
    assert max(len(record.pieces) for record in pieces.values()) > 1, "no weight was cut: the case tests nothing"


def test_many_ranks_gather(tmp_path):
    """Where ZeRO-3 would cut weights into too many slices they are gathered, and dp ranks take turns: same bits."""
    case = {"dp2-zero3": LAYOUTS[2]["dp2-zero3"]}
    run_ranks(make_reference, 1, tmp_path, {})
    run_ranks(load_and_save, 2, tmp_path, case, {}, 1, 0)
    assert differences(tmp_path, list(case)) == []
    pieces = CheckpointReader(tmp_path / "dp2-zero3" / f"step-{SAVED_STEP:07d}").manifest.tensors
    assert all(len(record.pieces) == 1 for record in pieces.values())


@pytest.mark.parametrize("shape", [(7,), (3, 4), (1, 5), (4, 1), (2, 3, 4)])
def test_rectangles_of_a_slice(shape):
    """Every slice of a small array: the rectangles, read in order, are the slice, and few of them are needed."""
    size = math.prod(shape)
    array = np.arange(size).reshape(shape)
    for start, stop in itertools.combinations(range(-1, size + 2), 2):
        rectangles = list(rectangles_of_slice(shape, start, stop))
        parts = [array[rectangle.slices].reshape(-1) for rectangle in rectangles]
        got = np.concatenate(parts) if parts else np.array([], dtype=int)
        assert got.tolist() == list(range(max(start, 0), min(stop, size))), (shape, start, stop)
        assert len(rectangles) <= 2 * len(shape) - 1
