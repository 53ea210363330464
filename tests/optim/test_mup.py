"""muP: factors against the table of the paper, layouts against one process, folded weights against the model, and the
coordinate check itself."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from megalite.architecture.architecture import query_scale
from megalite.architecture.mup import embedding_scale, output_scale, width_multiplier
from megalite.architecture.weights import weight_table
from megalite.config.schema import Config
from megalite.errors import ConfigError, UserError
from megalite.model.initialize import FreshWeights, fill
from megalite.model.mup import Folded, without_mup
from megalite.optim.groups import rate_factor
from megalite.studies.mup_check import FLAT_SLOPE, check_mup, parse_widths, widened
from tests.kit.spawn import run_ranks
from tests.kit.train import tiny_config, train
from tests.model.stages import GPT_STYLE, make_batch, make_stage, run_stage, tiny_model

MUP = {"base_hidden_size": 8, "base_head_dim": 2, "embedding_multiplier": 3.0, "output_multiplier": 5.0}
"""At a width of 32 with heads of 8: m = 4, heads four times as wide."""

LOSS_TOLERANCE, NORM_TOLERANCE = 1e-5, 1e-4
"""fp32 sums in another order; the norm's is relative."""

EXACT = 1e-12
"""float64."""


def test_factors():
    """Yang et al. 2022, table 8, with m = 4: deviations, rates and multipliers of each kind of weight."""
    model, base = tiny_model(mup=MUP), tiny_model()
    assert width_multiplier(model) == 4.0
    assert (embedding_scale(model), output_scale(model), query_scale(model)) == (3.0, 5.0 / 4, 0.5)
    table = weight_table(model)
    for name, row in table.items():
        is_matrix = name.startswith("blocks.") and len(row.shape) == 2
        for rule, exponent in {
            "adamw": 1.0,
            "adamw8bit": 1.0,
            "lion": 1.0,
            "schedule_free_adamw": 1.0,
            "lion8bit": 1.0,
            "muon": 0.5,
            "muon8bit": 0.5,
        }.items():
            assert rate_factor(row, model, rule) == (4.0**-exponent if is_matrix else 1.0), name
            assert rate_factor(row, base, rule) == 1.0
        mine, usual = (FreshWeights(m, 1).read(row, row.local(1, 0)) for m in (model, base))
        torch.testing.assert_close(mine, usual / 2 if is_matrix else usual)


def test_the_mlp_may_grow_otherwise():
    """With a base width of its own, the matrix out of the MLP goes by that."""
    model = tiny_model(mup={"base_hidden_size": 8, "base_ffn_hidden_size": 24})
    table = weight_table(model)
    assert rate_factor(table["blocks.0.mlp.down.weight"], model, "adamw") == 24 / 48
    assert rate_factor(table["blocks.0.mlp.up.weight"], model, "adamw") == 1 / 4


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tie_embeddings": True, "qk_norm": True},
        {**GPT_STYLE, "tie_embeddings": True},
        {"bias": "qkv", "num_kv_heads": 2},
    ],
    ids=lambda settings: "-".join(settings) or "plain",
)
def test_folded_weights_are_the_model_without_mup(settings: dict[str, Any]):
    """The usual model with folded weights has the same loss and logits."""
    model = tiny_model(mup=MUP, **settings)
    ours, usual = make_stage(model), make_stage(without_mup(model))
    fill(usual, Folded(FreshWeights(model, 1), model))
    batch = make_batch()
    found, expected = run_stage(usual, batch), run_stage(ours, batch)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)  # folded in fp32
    plain = make_stage(without_mup(model))
    assert abs(run_stage(plain, batch) - expected) > 1e-3


def curves(layouts: list[dict[str, Any]]) -> list[list[tuple[float, float]]]:
    return [train(tiny_config(model={"mup": MUP, "tie_embeddings": True}, parallel=layout), 5) for layout in layouts]


def test_layouts_agree():
    """tp, a pipeline with a tied head, and ZeRO 1 to 3 train as one process: each weight has its factor."""
    (truth,) = run_ranks(curves, 1, [{"zero_stage": 0}])[0]
    layouts = [{"tp": 2, "zero_stage": 1, "sequence_parallel": True}, {"pp": 2, "zero_stage": 1}]
    layouts += [{"dp": 2, "zero_stage": stage} for stage in (1, 2, 3)]
    for found in run_ranks(curves, 2, layouts):
        for layout, curve in zip(layouts, found, strict=True):
            for (loss, norm), (true_loss, true_norm) in zip(curve, truth, strict=True):
                assert loss == pytest.approx(true_loss, abs=LOSS_TOLERANCE), layout
                assert norm == pytest.approx(true_norm, rel=NORM_TOLERANCE), layout
    (usual,) = run_ranks(usual_curve, 1)
    assert abs(usual[-1][0] - truth[-1][0]) > 100 * LOSS_TOLERANCE


def usual_curve() -> list[tuple[float, float]]:
    return train(tiny_config(model={"tie_embeddings": True}, parallel={"zero_stage": 0}), 5)


def coordinates(optimizer: str, widths: list[int]) -> str:
    config = Config(
        model={"hidden_size": 64, "num_heads": 4, "num_layers": 2, "ffn_hidden_size": 128},
        optimizer={"name": optimizer},
        train={"steps": 4},
    )
    found = check_mup(config, widths, num_steps=4, lr=1e-3, vocab_size=128, is_connected=True)
    return json.dumps([found.slopes(found.with_mup), found.slopes(found.without), found.is_flat])


@pytest.mark.parametrize(("optimizer", "widths"), [("adamw", [64, 128, 256]), ("muon", [64, 192])])
def test_coordinates_are_flat_with_mup_and_not_without(optimizer, widths):
    """No layer's change depends on the width under muP; without, every layer's grows."""
    flat, growing, is_flat = json.loads(run_ranks(coordinates, 1, optimizer, widths)[0])
    assert is_flat
    assert all(abs(slope) < FLAT_SLOPE for slope in flat.values()), flat
    assert all(slope > 1.5 * FLAT_SLOPE for layer, slope in growing.items() if layer != "embedding"), growing


@pytest.mark.parametrize(
    ("optimizer", "lr", "words"),
    [
        ({"name": "sgd"}, 1e-3, "how sgd scales with the width is not known here; use adamw"),
        ({}, 0.0, "--lr: found 0, expected a rate above 0"),
        ({"lr_scales": {"embedding": 1e-30}}, 1e-30, "moved by 0 in 1 steps at rate 1e-30"),
    ],
)
def test_a_check_that_cannot_tell_is_refused(optimizer, lr, words):
    """Before it starts, or by the layer that does not move."""
    assert words in run_ranks(refusal, 1, optimizer, lr)[0]


EXPERTS = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 32}
LATENTS = {"kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"model": {"moe": EXPERTS}}, ["the width of experts and routers"]),
        ({"model": {"mla": LATENTS}}, ["the widths of latents"]),
        ({"model": {"mtp": {"num_layers": 1}}}, ["the matrix that joins two streams"]),
        ({"model": {"lora": {"rank": 4, "alpha": 8}}}, ["how adapters scale with the width"]),
        ({"optimizer": {"groups": [{"match": "embedding.*", "frozen": True}]}}, ["optimizer.groups.0.frozen"]),
        ({"model": {"moe": EXPERTS, "mla": LATENTS}}, ["experts and routers", "widths of latents"]),
    ],
)
def test_a_part_without_a_rule_is_refused(changed, words):
    """As a config with model.mup is: all of it, and before anything is trained."""
    model = {"hidden_size": 64, "num_heads": 4, "num_layers": 2, "ffn_hidden_size": 128, **changed.get("model", {})}
    config = Config(model=model, optimizer=changed.get("optimizer", {}), train={"steps": 1})
    with pytest.raises(ConfigError) as error:
        check_mup(config, [32, 64], num_steps=1, lr=1e-3, vocab_size=32)
    said = str(error.value)
    assert said.count("\n  - ") == len(words), said
    assert all(each in said for each in words), said


def refusal(optimizer: dict, lr: float) -> str:
    """Positions are learned here, fewer than the check's batch has."""
    model = {"hidden_size": 64, "num_heads": 4, "num_layers": 1, "positions": "learned", "max_positions": 8}
    config = Config(model={**model, "ffn_hidden_size": 128}, optimizer=optimizer, train={"steps": 1})
    with pytest.raises(UserError) as error:
        check_mup(config, [32, 64], num_steps=1, lr=lr, vocab_size=32, is_connected=True)
    return str(error.value)


def test_widened():
    """Heads and MLP in proportion, the width of a head kept; parts of heads are refused."""
    model = Config(model={"hidden_size": 256, "num_heads": 8, "num_kv_heads": 2}).model
    wide = widened(model, 1024)
    assert (wide.hidden_size, wide.num_heads, wide.num_kv_heads, wide.head_dim) == (1024, 32, 8, 32)
    with pytest.raises(
        ValueError, match=r"num_kv_heads=2 of width 256 would be 0\.5; use widths that are multiples of"
    ):
        widened(model, 64)
    with pytest.raises(ValueError, match="--widths: found 64,x"):
        parse_widths("64,x")
