"""Rounded weights in whole training steps: gradients, layouts, recomputation, compiled blocks, resuming, the start."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.architecture.architecture import Architecture
from megalite.checkpoint.rounded_weights import RoundedSource, RunRounding
from megalite.config.rounded import rounded_weights
from megalite.config.schema import Config
from megalite.layers.attention_blocks import attend_in_blocks
from megalite.layers.parts import Parts
from megalite.layers.precision import ONE_FORMAT, Precision
from megalite.layers.qat.precision import Qat
from megalite.model.initialize import FreshWeights, WeightSource
from megalite.model.spec import StageSpec
from megalite.model.transformer import Stage
from tests.kit.graphs import make_no_kernels
from tests.kit.spawn import run_ranks
from tests.kit.train import start_rank, tiny_config, train
from tests.model.stages import gradients, make_batch, run_stage

STEPS = 4
COMPARED = 2
LAYOUT_TOLERANCE = 1e-4
"""Relative, of loss and gradient norm of the first steps. Sums in another order differ by 1e-6, and now and then move a
weight over a border of its grid; scales of other groups move these numbers by 1e-2."""

MODEL = {"hidden_size": 64, "num_heads": 4, "ffn_hidden_size": 128, "init_std": 0.2}
INT4 = {"bits": 4, "group_size": 32}
LEARNED = {**INT4, "learned_scales": True}
LEARNED_ROWS = {**LEARNED, "group_size": None}
ROWS = {"bits": 4, "group_size": None, "symmetric": False}
EXPERTS = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 64, "shared_ffn_hidden_size": 64, "aux_loss": 0.01}
MLA = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}


def qat_config(qat: dict[str, Any] | None, **sections: dict[str, Any]) -> Config:
    """A tiny run with rounded weights, or plain."""
    return tiny_config(
        model={**MODEL, **sections.pop("model", {})},
        precision={"qat": qat, **sections.pop("precision", {})},
        **sections,
    )


def curves(configs: list[Config], steps: int = COMPARED) -> list[list[tuple[float, float]]]:
    return [train(config, steps) for config in configs]


def gap(one: list[tuple[float, float]], two: list[tuple[float, float]]) -> float:
    pairs = zip(one, two, strict=True)
    return max(abs(a - b) / b for left, right in pairs for a, b in zip(left, right, strict=True))


CASES = {
    "groups": qat_config(INT4),
    "rows": qat_config(ROWS),
    "experts": qat_config(INT4, model={"moe": EXPERTS}),
    "latents": qat_config(INT4, model={"mla": MLA, "num_kv_heads": 4}),
    "learned": qat_config(LEARNED),
    "learned, rows": qat_config(LEARNED_ROWS),
    "learned, latents": qat_config(LEARNED, model={"mla": MLA, "num_kv_heads": 4}),
}
LAYOUTS = {
    "tp 2": {"tp": 2},
    "tp 2, sequence parallel": {"tp": 2, "sequence_parallel": True},
    "zero bubble": {"pp": 2, "schedule": "zb-h1"},
    "dp 2": {"zero_stage": 1},
    "ZeRO-3": {"zero_stage": 3, "engine": "deepspeed"},
    "FSDP2": {"zero_stage": 3, "engine": "fsdp2"},
}
OF_EXPERTS = {"ep 2, FSDP2": {"ep": 2, "zero_stage": 3, "engine": "fsdp2"}}


def test_layouts_agree():
    """Losses and gradient norms of six layouts are one rank's, for groups, rows whose scale spans ranks, experts,
    latents and scales that are trained; and they are not those of plain training."""
    plain = {name: qat_config(None, model=config.model.model_dump()) for name, config in CASES.items()}
    ones = run_ranks(curves, 1, [*CASES.values(), *plain.values()])[0]
    truth = dict(zip(CASES, ones[: len(CASES)], strict=True))
    for name, other in zip(CASES, ones[len(CASES) :], strict=True):
        assert gap(truth[name], other) > 100 * LAYOUT_TOLERANCE, name
    chosen = {case: LAYOUTS if case in ("groups", "learned") else ("tp 2, sequence parallel",) for case in CASES}
    chosen["experts"] = ("tp 2", "ep 2, FSDP2")
    made = {
        (case, name): Config(**{**CASES[case].model_dump(), "parallel": {**LAYOUTS, **OF_EXPERTS}[name]})
        for case, names in chosen.items()
        for name in names
    }
    found = run_ranks(curves, 2, list(made.values()))[0]
    gaps = {key: gap(curve, truth[key[0]]) for key, curve in zip(made, found, strict=True)}
    assert max(gaps.values()) < LAYOUT_TOLERANCE, gaps


def make_stage(model: Architecture, precision: Precision, source: WeightSource, **parts: Any) -> Stage:
    return Stage(StageSpec(model, parts=Parts(precision=precision, attend=attend_in_blocks, **parts)), source)


def compare_with_rounded_model(configs: list[Config]) -> list[dict[str, Any]]:
    """What of a stage is rounded, and its loss and gradients beside those of a plain one that has rounded weights."""
    results = []
    for config in configs:
        model, qat = start_rank(config).plan.model, config.precision.qat
        fresh, precision = FreshWeights(model, 0), Qat(qat, model.num_layers, keep_weights=True)
        rounded = RoundedSource(fresh, RunRounding(qat, torch.float32, model.num_layers))
        stages = [make_stage(model, ONE_FORMAT, rounded), make_stage(model, precision, fresh)]
        losses = [run_stage(stage, make_batch()) for stage in stages]
        for loss in losses:
            loss.backward()
        plain, ours = map(gradients, stages)
        results.append(
            {
                "named alike": {each.parameter for each in rounded_weights(qat, model)} == set(precision.weights),
                "losses": [loss.item() for loss in losses],
                "gap": max(((one - ours[name]).norm() / one.norm()).item() for name, one in plain.items()),
            }
        )
    return results


def test_gradients_are_those_of_the_rounded_model():
    """Straight through: loss and all gradients are those of a plain model that has the rounded weights, which are read
    as an export reads them; and the table of weights names the very parameters that are rounded."""
    kept = {**INT4, "keep_first_blocks": 1, "keep_last_blocks": 1}
    straight = [case for name, case in CASES.items() if "learned" not in name]
    for found in run_ranks(compare_with_rounded_model, 1, [*straight, qat_config(kept)])[0]:
        assert found["named alike"]
        assert found["losses"][0] == pytest.approx(found["losses"][1], rel=1e-6)
        assert found["gap"] < 1e-4


def test_recomputed_blocks_round_alike():
    """Curves under full and selective recomputation are bit-equal to those without, and MLPs in chunks whose scales are
    trained have those of whole ones."""
    kinds = [
        qat_config(qat, train={"recompute": kind}) for qat in (INT4, LEARNED) for kind in ("none", "full", "selective")
    ]
    chunks = [qat_config(LEARNED, train={"mlp_chunk_tokens": size}) for size in (None, 16)]
    found = run_ranks(curves, 1, [*kinds, *chunks], 3)[0]
    assert found[1:3] == [found[0]] * 2
    assert found[4:6] == [found[3]] * 2
    assert gap(*found[6:]) < LAYOUT_TOLERANCE


def compiled_beside_eager(
    qat: dict[str, Any], *, hands_over: bool
) -> tuple[list[float], list[dict[str, float]], int, int]:
    """Losses of a step before and one after rounding begins, eager and compiled; norms of the gradients of each pair's
    second; graphs, and breaks in them. No kernels are made, which would take half a minute."""
    make_no_kernels()
    torch._dynamo.config.error_on_recompile = True
    config = qat_config(qat, model={"num_layers": 2})
    model, losses, norms = start_rank(config).plan.model, [], []
    for is_compiled in (False, True):
        taken = dict[torch.nn.Parameter, torch.Tensor]()
        take: dict[str, Any] = {"take_gradient": lambda weight, made, taken=taken: taken.update({weight: made.make()})}
        precision = Qat(config.precision.qat, model.num_layers, keep_weights=True)
        stage = make_stage(model, precision, FreshWeights(model, 0), **(take if hands_over else {}))
        if is_compiled:
            stage.compile_blocks()
        for step in (1, 2):
            precision.begin_step(step)
            stage.zero_grad()
            loss = run_stage(stage, make_batch())
            loss.backward()
            losses.append(loss.item())
        norms.append({name: taken.get(each, each.grad).norm().item() for name, each in stage.named_parameters()})
    counters = torch._dynamo.utils.counters
    return losses, norms, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@pytest.mark.parametrize(
    ("qat", "hands_over"),
    [({**INT4, "start_step": 2}, True), (LEARNED, True), (LEARNED, False)],
    ids=["begins later", "learned", "learned, by autograd"],
)
def test_compiled_blocks_are_one_graph(qat: dict[str, Any], hands_over: bool):
    """Both blocks share one graph, which stays when rounding begins, and compute what eager ones do, scales' gradients
    among it."""
    losses, (eager, compiled), graphs, breaks = run_ranks(
        partial(compiled_beside_eager, hands_over=hands_over), 1, qat
    )[0]
    assert losses[:2] == pytest.approx(losses[2:], rel=1e-5)
    assert (losses[0] == losses[1]) is ("start_step" not in qat)
    assert compiled == pytest.approx(eager, rel=1e-4)
    assert any(name.endswith("learned.scale") for name in eager) is ("learned_scales" in qat)
    assert (graphs, breaks) == (1, 0)


def leg(root: Path, config: Config, first: int, last: int) -> list[tuple[float, float]]:
    """Go on from a checkpoint, if there is one for the step, train, and save."""
    folder = root / f"step-{first:07d}"
    rank = start_rank(config, folder if folder.is_dir() else None)
    curve = rank.train(first, last)
    rank.save(root, last)
    return curve


@pytest.mark.parametrize("qat", [INT4, LEARNED], ids=["int4", "learned"])
def test_resumed_runs_are_bit_equal(qat: dict[str, Any], tmp_path: Path):
    """A run in two halves has the losses of one in a piece: nothing of the rounding has to be remembered but the scales
    that are trained."""
    config = qat_config(qat, precision={"dtype": "bf16"})
    whole = run_ranks(leg, 1, tmp_path / "whole", config, 0, STEPS)[0]
    halves = [run_ranks(leg, 1, tmp_path / "halves", config, *steps)[0] for steps in ((0, 2), (2, STEPS))]
    assert whole == halves[0] + halves[1]
