"""Conflicts of `precision.qat`: each is found, with the nearest legal choice."""

from __future__ import annotations

from typing import Any

import pytest

from megalite.config.plan import default_world_size
from megalite.config.schema import Config
from megalite.config.validate import validate
from megalite.errors import ConfigError


def config(qat: dict[str, Any], **sections: dict[str, Any]) -> Config:
    """A config that is valid but for the given settings."""
    precision = {"qat": {"bits": 4, **qat}, **sections.pop("precision", {})}
    model = {"hidden_size": 512, "num_heads": 8, "ffn_hidden_size": 768, **sections.pop("model", {})}
    return Config(**{"train": {"steps": 100}, "precision": precision, "model": model, **sections})


CONFLICTS = {
    "FP8 too": (
        config({}, precision={"fp8": {"backend": "emulate"}}),
        "precision.qat: weights are rounded to integers or to FP8, not to both; use qat=null, or fp8=null",
    ),
    "fp16": (
        config({}, precision={"dtype": "fp16"}),
        "precision.dtype: scales of small weights underflow in fp16, and precision.qat divides by them; use dtype=bf16 "
        "or fp32",
    ),
    "no block left": (
        config({"keep_first_blocks": 2, "keep_last_blocks": 2}),
        "precision.qat.keep_last_blocks: 2 blocks at the start and 2 at the end leave none of num_layers=4 to be "
        "rounded; keep fewer, or set precision.qat=null",
    ),
    "a start behind the end": (
        config({"start_step": 101}),
        "precision.qat.start_step: 101 is behind the last of 100 steps, and nothing would be rounded; use 100 or less, "
        "or precision.qat=null",
    ),
    "a part of a group": (
        config({}, model={"ffn_hidden_size": 736}),
        "precision.qat.group_size: blocks.0.mlp.down has rows of 736 numbers, which are no whole groups of 128; use "
        "group_size=32 or null",
    ),
    "groups on two ranks": (
        config({}, parallel={"tp": 4}),
        "precision.qat.group_size: blocks.0.mlp.down has rows of 768 / tp=4 numbers, which are no whole groups of 128; "
        "use group_size=32, 64 or null, or tp=1, 2 or 3",
    ),
    "learned scales and zero points": (
        config({"learned_scales": True, "symmetric": False}),
        "precision.qat.learned_scales: scales are trained without zero points; use symmetric=true, or "
        "learned_scales=false",
    ),
    "learned scales, later": (
        config({"learned_scales": True, "start_step": 10}),
        "precision.qat.learned_scales: scales begin with the weights, and start_step=10 would round with old ones; "
        "train without qat first, and go on with train.init_from in a new run, or use learned_scales=false",
    ),
    "learned scales of experts": (
        config({"learned_scales": True}, model={"moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 128}}),
        "precision.qat.learned_scales: scales of experts are not trained; use a model without model.moe, or "
        "learned_scales=false",
    ),
    "learned scales under muP": (
        config({"learned_scales": True}, model={"mup": {"base_hidden_size": 256}}),
        "precision.qat.learned_scales: how rates of scales go with the width is not known here; use model.mup=null, or "
        "learned_scales=false",
    ),
    "experts": (
        config({}, model={"moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 96}}),
        "precision.qat.group_size: blocks.0.mlp.experts.0.down has rows of 96 numbers, which are no whole groups of "
        "128; use group_size=32 or null",
    ),
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_conflicts_are_found_with_the_nearest_legal_choice(name):
    """And nothing else is."""
    given, complaint = CONFLICTS[name]
    with pytest.raises(ConfigError) as found:
        validate(given, default_world_size(given))
    assert found.value.problems == (complaint,)


def test_rows_have_a_scale_over_all_ranks():
    """A scale a row fits every width and every cut."""
    given = config({"group_size": None}, model={"ffn_hidden_size": 736}, parallel={"tp": 4})
    validate(given, default_world_size(given))
