"""What must hold where a model has multi-head latent attention."""

from __future__ import annotations

from typing import Any

import pytest

from megalite.config.schema import Config
from megalite.config.validate import validate
from megalite.errors import ConfigError

MLA = {"kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
MODEL = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "ffn_hidden_size": 128, "vocab_size": 101, "mla": MLA}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another head_dim": ({"head_dim": 16}, "model.head_dim: found 16, and mla has qk_nope_head_dim"),
    "fewer heads of keys": ({"num_kv_heads": 2}, "model.num_kv_heads: mla makes keys and values of all num_heads=4"),
    "wide values": ({"mla": {**MLA, "v_head_dim": 24}}, "model.mla.v_head_dim: 24 is wider than queries and keys, 20"),
    "a table of positions": (
        {"positions": "learned"},
        "model.positions: mla rotates a part of each head; found learned",
    ),
    "a fraction": ({"rope": {"fraction": 0.5}}, "model.rope.fraction: mla.qk_rope_head_dim says how much"),
    "an odd number of channels": (
        {"mla": {**MLA, "qk_rope_head_dim": 7}},
        "model.mla.qk_rope_head_dim: 7 channels are rotated, and they turn in pairs; use 6 or 8",
    ),
    "norms of heads": ({"qk_norm": True}, "model.qk_norm: found True, but it has no effect with mla"),
    "biases": ({"bias": "attention"}, "model.bias: mla has none; found attention, use none"),
    "muP": ({"mup": {"base_hidden_size": 32}}, "model.mup: no rule is known here for the widths of latents"),
    "no latent": ({"mla": {**MLA, "kv_lora_rank": 0}}, "kv_lora_rank"),
    "a key of another name": ({"mla": {**MLA, "rope_dim": 4}}, "rope_dim"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str):
    changes, sentence = REFUSED[name]
    with pytest.raises((ConfigError, ValueError), match=sentence.replace("(", r"\(")):
        validate(Config(model={**MODEL, **changes}, train={"steps": 1}), 1)


@pytest.mark.parametrize("changes", [{}, {"rope": {"interleaved": True}}, {"mla": {**MLA, "q_lora_rank": 24}}])
def test_taken(changes: dict):
    validate(Config(model={**MODEL, **changes}, train={"steps": 1}), 1)


def test_heads_are_what_tp_divides():
    with pytest.raises(ConfigError, match="num_heads=4 is not divisible by tp=3"):
        validate(Config(model=MODEL, train={"steps": 1}, parallel={"tp": 3}), 3)
