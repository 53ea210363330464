"""Conflicts of `precision.fp4`: each is found, with the nearest legal choice; what null stands for."""

from __future__ import annotations

from typing import Any

import pytest

from megalite.config.plan import default_world_size
from megalite.config.schema import Config, Fp4Config
from megalite.config.validate import validate
from megalite.errors import ConfigError


def config(fp4: dict[str, Any], **sections: dict[str, Any]) -> Config:
    """A config that is valid but for the given settings."""
    precision = {"fp4": {"format": "nvfp4", **fp4}, **sections.pop("precision", {})}
    model = {"hidden_size": 512, "num_heads": 8, "ffn_hidden_size": 768, **sections.pop("model", {})}
    train = {"steps": 100, **sections.pop("train", {})}
    return Config(**{"train": train, "precision": precision, "model": model, **sections})


CONFLICTS = {
    "FP8 too": (
        config({}, precision={"fp8": {"backend": "emulate"}}),
        "precision.fp4: products are rounded to FP4 or by precision.fp8, not by both; use fp4=null, or fp8=null",
    ),
    "fp16": (
        config({}, precision={"dtype": "fp16"}),
        "precision.dtype: fp16's loss scale would be in every FP4 scale; use dtype=bf16 or fp32",
    ),
    "experts": (
        config({}, model={"moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 96}}),
        "precision.fp4: products of experts are not known in FP4 yet; use precision.fp8 or qat, or fp4=null",
    ),
    "compiled": (
        config({}, train={"compile": "on"}),
        "train.compile: emulated FP4 ends the graph at each product; use compile=auto, or precision.fp4=null",
    ),
    "chunks": (
        config({}, train={"mlp_chunk_tokens": 64}),
        "train.mlp_chunk_tokens: FP4 scales are of whole matrices, not of chunks; use precision.fp4=null, or null",
    ),
    "no block left": (
        config({"keep_first_blocks": 3}),
        "precision.fp4.keep_last_blocks: 3 blocks at the start and 1 at the end leave none of num_layers=4 for FP4; "
        "keep fewer, or set precision.fp4=null",
    ),
    "a size of nothing": (
        config({"hadamard": "none", "hadamard_size": 32}),
        "precision.fp4.hadamard_size: found 32, but it has no effect with hadamard=none; leave it at null",
    ),
    "squares of what is transformed": (
        config({"hadamard": "backward"}),
        "precision.fp4.square_weights: hadamard=backward transforms weights before they are rounded, so that none of "
        "their numbers serves both passes; use false, or hadamard=weight_gradient",
    ),
    "a part of a block": (
        config({"format": "mxfp4"}, model={"ffn_hidden_size": 776}),
        "precision.fp4: blocks.0.mlp.gate has 776 rows, which are no whole blocks of 64; use widths of which 64 is a "
        "divisor",
    ),
    "blocks on two ranks": (
        config({"format": "mxfp4", "hadamard_size": 128}, parallel={"tp": 8}),
        "precision.fp4: blocks.0.attention.q has 512 / tp=8 rows, which are no whole blocks of 128; use "
        "hadamard_size=16, 32 or 64, or tp=1, 2 or 4, or widths of which 1024 is a divisor",
    ),
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_conflicts_are_found_with_the_nearest_legal_choice(name):
    """The first of them; widths that have the same fault follow."""
    given, complaint = CONFLICTS[name]
    with pytest.raises(ConfigError) as found:
        validate(given, default_world_size(given))
    assert found.value.problems[0] == complaint
    assert all(each.startswith("precision.fp4: blocks.0.") for each in found.value.problems[1:])


def test_null_takes_what_was_published():
    """NVFP4: all products, chance for gradients, transforms of 16 for weights' gradients, squares, 15 % of the blocks
    kept. MXFP4: the backward products, both operands by chance and transformed by 64."""
    nvfp4, mxfp4 = Fp4Config(format="nvfp4"), Fp4Config(format="mxfp4")
    names = ("forward", "stochastic_rounding", "hadamard", "hadamard_size", "square_weights")
    assert [getattr(nvfp4.filled, name) for name in names] == [True, "gradients", "weight_gradient", 16, True]
    assert [getattr(mxfp4.filled, name) for name in names] == [False, "backward", "backward", 64, False]
    assert (nvfp4.rounded_blocks(32), mxfp4.rounded_blocks(32)) == (range(27), range(32))
    given = Fp4Config(format="nvfp4", forward=False, keep_last_blocks=0, keep_first_blocks=1)
    assert given.filled.forward is False
    assert given.rounded_blocks(4) == range(1, 4)
