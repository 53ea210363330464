"""Odd numbers in the section `model`: refused in words, or everything that follows from them can be computed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from megalite.architecture.architecture import Architecture
from megalite.architecture.costs import block_activation_bytes, count_parameters, flops_per_token
from megalite.architecture.mup import embedding_scale, ffn_multiplier, output_scale
from megalite.architecture.settings import MupConfig, RopeConfig, RopeScaling
from megalite.checkpoint.hf.families.registry import exportable
from megalite.config.checks_model import OF_STRETCHES, check_architecture
from megalite.config.fill import fill_model
from megalite.config.model_match import Match, match
from megalite.config.schema import BatchConfig, ModelConfig
from megalite.layers.rope import frequencies, rotation

NUMBERS = (
    *(1, 2, 3, 0.1, 0.5, 1.0, 1.5, 8.0, 1e4, 1e-6, 1.0 + 2.0**-52, 2.0**-126, 2.0**-127, 1e-45, 1e-300, 5e-324),
    *(1e-30, 1e18, 2.0**62, 2**63 - 1, 1e30, 1e300, 10**400, 0, 0.0, -1, -1e-300, float("inf"), float("nan")),
)
SIZES = st.sampled_from((1, 2, 3, 4, 6, 8, 48))
"""Of what tables are made of: small, since the tables are."""

numbers = st.sampled_from(NUMBERS)


def some_of(keys: tuple[str, ...], values: st.SearchStrategy = numbers) -> st.SearchStrategy[dict[str, Any]]:
    """Up to three of these settings, each any number."""
    return st.lists(st.sampled_from(keys), max_size=3, unique=True).flatmap(
        lambda chosen: st.fixed_dictionaries(dict.fromkeys(chosen, values))
    )


def _scaling(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    keys = tuple(
        key for key in OF_STRETCHES[kind] if not key.endswith("factor") or key in ("factor", "low_freq_factor")
    )
    lists = st.lists(numbers, min_size=1, max_size=4).map(lambda each: [*each, 1.0, 1.0, 1.0, 1.0][:4])
    factors = {"short_factor": lists, "long_factor": lists} if kind == "longrope" else {}
    fixed = st.fixed_dictionaries({"type": st.just(kind), **factors})
    return st.tuples(fixed, some_of(keys)).map(lambda both: {**both[0], **both[1]})


scalings = st.none() | st.sampled_from(tuple(OF_STRETCHES)).flatmap(_scaling)
ropes = st.tuples(some_of(("theta", "fraction")), scalings).map(lambda both: {**both[0], "scaling": both[1]})
FREE = ("norm_eps", "attention_scale", "attention_soft_cap", "logit_soft_cap", "embedding_scale", "init_std", "z_loss")
models = st.tuples(
    st.fixed_dictionaries({"rope": ropes, "mup": st.none() | some_of(tuple(MupConfig.model_fields))}),
    some_of((*FREE, "max_positions", "sliding_window", "dropout")),
    some_of(("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "ffn_hidden_size"), SIZES),
).map(lambda parts: {"vocab_size": 64, "head_dim": 8, **parts[0], **parts[1], **parts[2]})


def compute_all(model: Architecture) -> list[float]:
    """Everything that is computed of a model before it is built, and the rotation of its first and last tokens."""
    found = [count_parameters(model), flops_per_token(model, 16), model.embedding_scale]
    found += [embedding_scale(model), output_scale(model), ffn_multiplier(model)]
    for block in model.blocks:
        found += [block.attention.query_scale, block_activation_bytes(block, model.hidden_size, element_bytes=4)]
    positions = torch.tensor([0, 1, model.max_positions - 1])
    for rope in filter(None, (model.rope, model.sliding_rope)):
        by = frequencies(rope, model.head_dim)
        for turned in rotation(positions, by, reach=positions + 1):
            found += turned.flatten().tolist()
    assert match(model, model) == Match((), ())
    exportable(model)
    return found


def what_happens(fields: dict[str, Any]) -> list[str] | None:
    """Complaints about a model, or None where it is fine and everything of it is a number."""
    try:
        given_ = ModelConfig(**fields)
    except ValidationError as error:
        return [each["msg"] for each in error.errors()]
    model = fill_model(given_, BatchConfig())
    if wrong := list(check_architecture(given_, model)):
        return wrong
    found = compute_all(model)
    assert all(map(math.isfinite, found)), fields
    return None


SHORT_LIST, LONGROPE = [1.0] * 4, {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@settings(max_examples=300, deadline=None, derandomize=True)
@given(models)
@example({"vocab_size": 64, "head_dim": 8, "attention_scale": 1e-200})
@example({"vocab_size": 64, "head_dim": 8, "rope": {"scaling": {**LONGROPE, "short_factor": [1e-37] * 4}}})
def test_any_number(fields: dict[str, Any]):
    """Whatever the numbers of a model are, checks find it or no arithmetic fails on it."""
    what_happens(fields)


ODD = [
    ({"rope": {"theta": 1.0, "scaling": {"type": "yarn"}}}, "model.rope.theta: 1 gives all pairs one frequency"),
    ({"rope": {"theta": 0.5}}, "model.rope.theta: 0.5 is below 1"),
    ({"rope": {"scaling": {**LONGROPE, "original_max_positions": 1}}}, "rope.scaling.original_max_positions: 1"),
    (
        {"sliding_window": 4, "sliding_rope": {"scaling": {**LONGROPE, "original_max_positions": 1}}},
        "model.sliding_rope.scaling.original_max_positions: 1",
    ),
    ({"rope": {"scaling": {"type": "linear", "factor": 1e-30}}}, "model.rope.scaling.factor: 1e-30"),
    ({"rope": {"scaling": {**LONGROPE, "long_factor": [1.0, 1e-37, 1.0, 1.0]}}}, "scaling.long_factor: 1e-37"),
    ({"attention_scale": 1e-200}, "numbers nearer to 0 than 2^-126"),
    ({"attention_soft_cap": 1e-45}, "numbers nearer to 0 than 2^-126"),
]


@pytest.mark.parametrize(("fields", "message"), ODD)
def test_numbers_that_arithmetic_fails_on(fields: dict[str, Any], message: str):
    """Each is refused by its name."""
    found = what_happens({"vocab_size": 64, "head_dim": 8, **fields})
    assert found is not None
    assert any(message in each for each in found), found


def test_odd_numbers_that_are_fine():
    """What is only unusual is not refused: a longrope that never was shorter, yarn over few positions."""
    for scaling in (
        {**LONGROPE, "original_max_positions": 1, "attention_factor": 1.0},
        {**LONGROPE, "original_max_positions": 1, "factor": 1.0},
        {"type": "yarn", "original_max_positions": 1},
    ):
        assert what_happens({"vocab_size": 64, "head_dim": 8, "rope": {"scaling": scaling}}) is None
    assert RopeConfig(theta=1.0).theta == 1.0
    assert RopeScaling(type="linear").sharpness == 1.0
