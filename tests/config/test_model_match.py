"""Which differences between models their weights bear."""

from __future__ import annotations

import pytest

from megalite.architecture.architecture import Architecture
from megalite.architecture.attentions import ATTENTIONS, Attention
from megalite.architecture.settings import WeightScales
from megalite.architecture.weights import weight_table
from megalite.config.fill import fill_model
from megalite.config.model_match import CHOICES, TRAINING_ONLY, match
from megalite.config.schema import BatchConfig, ModelConfig, RopeConfig
from tests.kit.plugins import added

SCALED = {"scaling": {"type": "linear", "factor": 2.0}}

OTHERS = {
    "hidden_size": 80,
    "num_layers": 3,
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 20,
    "ffn_hidden_size": 96,
    "vocab_size": 200,
    "activation": "gelu",
    "norm": "layernorm",
    "norm_eps": 1e-6,
    "positions": "learned",
    "max_positions": 999,
    "qk_norm": True,
    "bias": "all",
    "z_loss": 1e-4,
    "tie_embeddings": True,
    "sliding_window": 7,
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_rope": {"theta": 5e5},
    "attention": "no_attention",
    "norm_placement": "both",
    "parallel_residual": True,
    "attention_scale": 0.3,
    "attention_sinks": True,
    "attention_soft_cap": 5.0,
    "logit_soft_cap": 3.0,
    "embedding_scale": 8.0,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "init_std": 0.01,
    "init_depth_scaling": False,
    "init": {"rule": "he_normal"},
    "mup": {"base_hidden_size": 32},
    "rope": {"theta": 5e5},
    "moe": {"num_experts": 4},
    "mtp": {"num_layers": 2},
    "lora": {"rank": 4},
    "weight_scales": WeightScales(bits=4, group_size=32, first_block=0, last_block=1),
    "mla": {"kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 8},
}
"""Another value of each field of a model."""


@pytest.fixture(autouse=True)
def _another_attention():
    with added(ATTENTIONS, "no_attention", Attention("none:such")):
        yield


def model(**fields) -> Architecture:
    sizes = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "head_dim": 16, "ffn_hidden_size": 128}
    return fill_model(ModelConfig(**{**sizes, "vocab_size": 101, **fields}), BatchConfig(seq_len=64))


def test_every_field_is_of_one_kind():
    """A field that is new here has to be told apart too, and what is named exists."""
    assert set(OTHERS) == set(Architecture.model_fields)
    names = {f"rope.{name}" for name in RopeConfig.model_fields} | set(Architecture.model_fields)
    names |= {"moe.has_bias", "mtp.num_layers"}
    assert names >= CHOICES | TRAINING_ONLY


@pytest.mark.parametrize("name", OTHERS)
def test_fields(name):
    """What changes a weight's shape, or what the architecture computes from it, is refused; choices are said."""
    theirs, ours = model(), model().model_copy(update={name: OTHERS[name]})
    if name in ModelConfig.model_fields:
        ours = model(**{name: OTHERS[name]})
    found = match(theirs, ours)
    if name in TRAINING_ONLY or name in ("lora", "weight_scales"):  # they are added, or begin anew
        assert found == match(theirs, theirs)
        return
    is_choice = name in CHOICES or name in ("rope", "mtp")
    assert bool(found.changed) == is_choice
    assert bool(found.refused) != is_choice
    assert f"model.{name}" in (*found.changed, *found.refused)[0]
    if weight_table(theirs) != weight_table(ours):
        assert bool(found.refused) != (name == "mtp")


@pytest.mark.parametrize(("rope", "is_refused"), [({"theta": 5e5}, False), (SCALED, False), ({"fraction": 0.5}, True)])
def test_rotary_settings(rope, is_refused):
    """How fast heads turn is a choice; how much of them turns is not."""
    found = match(model(), model(rope=rope))
    assert bool(found.refused) == is_refused
    assert bool(found.changed) != is_refused


def test_positions_that_a_shorter_run_does_not_reach():
    """Rotary positions have no last one: a shorter run is no change, a longer one is; a learned table is a weight."""
    assert match(model(), model(max_positions=32)).changed == ()
    assert match(model(), model(max_positions=128)).changed == ("model.max_positions is 128, the weights have 64",)
    learned = {"positions": "learned"}
    assert match(model(**learned), model(**learned, max_positions=32)).refused


def test_layers_that_predict_further():
    """They are left out or begun anew, and either is said; only some of them anew is refused."""
    none, one, two = model(), model(mtp={"num_layers": 1}), model(mtp={"num_layers": 2})
    for theirs, ours in ((none, two), (two, one), (one, none)):
        found = match(theirs, ours)
        assert found.refused == ()
        assert found.changed == (
            f"model.mtp.num_layers is {ours.num_predictions}, the weights have {theirs.num_predictions}",
        )
    assert match(one, two).refused
