"""The table of weights: it has every parameter once, and the parts of all ranks make the whole."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

from megalite.architecture.costs import count_parameters
from megalite.architecture.weights import VOCAB_MULTIPLE, Weight, by_parameter, weight_table
from megalite.config.fill import fill_model
from megalite.config.presets import PRESETS
from megalite.config.schema import BatchConfig, ModelConfig

VARIANTS = {
    "llama": {},
    "grouped": {"num_kv_heads": 4},
    "wide heads": {"head_dim": 16, "num_kv_heads": 4, "qk_norm": True},
    "qkv bias": {"bias": "qkv", "num_kv_heads": 4},
    "gpt": {"norm": "layernorm", "activation": "gelu", "bias": "all", "positions": "learned", "tie_embeddings": True},
    "tied": {"tie_embeddings": True},
    "gated with biases": {"activation": "swiglu", "bias": "all"},
}

TPS = (1, 2, 4)


def small(**keys: object) -> ModelConfig:
    """A filled model that tp 4 divides, with a vocabulary that it does not."""
    sizes = {"hidden_size": 64, "num_layers": 3, "num_heads": 8, "ffn_hidden_size": 96, "vocab_size": 301}
    return fill_model(ModelConfig(**{**sizes, **keys}), BatchConfig(seq_len=24))


def table_of(**keys: object) -> dict[str, Weight]:
    return weight_table(small(**keys))


@pytest.mark.parametrize("keys", VARIANTS.values(), ids=VARIANTS)
def test_counts_the_parameters(keys: dict):
    """The rows' sizes add up to what the plan says."""
    assert sum(prod(row.shape) for row in table_of(**keys).values()) == count_parameters(small(**keys))


@pytest.mark.parametrize("name", PRESETS)
def test_counts_the_presets(name: str):
    model = fill_model(ModelConfig(preset=name), BatchConfig(), 32000)
    assert sum(prod(row.shape) for row in weight_table(model).values()) == count_parameters(model)


@pytest.mark.parametrize("tp", TPS)
@pytest.mark.parametrize("keys", VARIANTS.values(), ids=VARIANTS)
def test_ranks_tile_the_whole(keys: dict, tp: int):
    """A cut weight is covered exactly once by the ranks' rectangles, an uncut one is whole on each."""
    for row in table_of(**keys).values():
        covered = np.zeros(row.shape, dtype=int)
        for rank in range(tp):
            covered[row.local(tp, rank).slices] += 1
        assert (covered == (1 if row.cut is not None else tp)).all(), row.name


@pytest.mark.parametrize("tp", TPS)
def test_local_shapes(tp: int):
    """Every rank allocates the same shape: its rectangle, padded only where the vocabulary is."""
    for row in table_of(bias="all").values():
        for rank in range(tp):
            held, allocated = row.local(tp, rank).shape, row.local_shape(tp)
            if row.is_vocab:
                assert held[0] <= allocated[0]
                assert held[1:] == allocated[1:]
            else:
                assert held == allocated


@pytest.mark.parametrize(
    ("vocab_size", "tp", "rows", "held"),
    [
        (301, 1, 320, [301]),
        (301, 2, 192, [192, 109]),
        (301, 4, 128, [128, 128, 45, 0]),
        (10, 4, 64, [10, 0, 0, 0]),
        (256, 4, 64, [64, 64, 64, 64]),
    ],
)
def test_vocabulary_padding(vocab_size: int, tp: int, rows: int, held: list[int]):
    """Equal allocations of whole tiles; the last ranks hold less of the truth, or none."""
    for row in (table_of(vocab_size=vocab_size)[name] for name in ("embedding.weight", "head.weight")):
        assert row.local_shape(tp) == (rows, 64)
        assert rows % VOCAB_MULTIPLE == 0
        assert [row.local(tp, rank).shape[0] for rank in range(tp)] == held
        assert row.shape[0] == vocab_size


def test_names_and_order():
    """The order of the model's layers; within a block the order of the computation."""
    assert list(table_of(num_layers=1, qk_norm=True)) == [
        "embedding.weight",
        "blocks.0.attention_norm.weight",
        "blocks.0.attention.q.weight",
        "blocks.0.attention.k.weight",
        "blocks.0.attention.v.weight",
        "blocks.0.attention.q_norm.weight",
        "blocks.0.attention.k_norm.weight",
        "blocks.0.attention.o.weight",
        "blocks.0.mlp_norm.weight",
        "blocks.0.mlp.gate.weight",
        "blocks.0.mlp.up.weight",
        "blocks.0.mlp.down.weight",
        "final_norm.weight",
        "head.weight",
    ]


def test_gpt_names():
    """Biases, learned positions and a plain MLP; a tied head has no row."""
    names = list(table_of(num_layers=1, **VARIANTS["gpt"]))
    assert names[:2] == ["embedding.weight", "embedding.positions"]
    assert "blocks.0.mlp.gate.weight" not in names
    assert "head.weight" not in names
    linear = ("attention.q", "attention.k", "attention.v", "attention.o", "mlp.up", "mlp.down")
    assert {f"blocks.0.{name}.bias" for name in (*linear, "attention_norm", "mlp_norm")} <= set(names)


def test_layers_are_prefixes():
    """A row belongs to the layer its name begins with."""
    for row in table_of(bias="all", norm="layernorm").values():
        assert row.name.startswith(f"{row.layer}.")
        assert row.parameter.startswith(f"{row.layer}.")


def test_fused_parameters():
    """What is fused is cut alike, on dim 0, and stacked in the order that the layers split it."""
    groups = by_parameter(table_of(bias="all", num_kv_heads=4))
    fused = {name: [row.name.rsplit(".", 2)[1] for row in rows] for name, rows in groups.items() if len(rows) > 1}
    assert fused["blocks.0.attention.qkv.weight"] == ["q", "k", "v"]
    assert fused["blocks.2.attention.qkv.bias"] == ["q", "k", "v"]
    assert fused["blocks.1.mlp.gate_up.weight"] == ["gate", "up"]
    assert len(fused) == 3 * 4
    for name in fused:
        assert {row.cut for row in groups[name]} == {0}


def test_cuts():
    """Column layers are cut by output with their bias, row layers by input, and their bias is whole."""
    table = table_of(bias="all", qk_norm=True)
    cuts = {name.removeprefix("blocks.0."): row.cut for name, row in table.items() if not name.startswith("blocks.1")}
    assert cuts["attention.k.weight"] == cuts["attention.k.bias"] == cuts["mlp.up.weight"] == cuts["mlp.up.bias"] == 0
    assert cuts["attention.o.weight"] == cuts["mlp.down.weight"] == 1
    assert cuts["attention.o.bias"] is cuts["mlp.down.bias"] is cuts["attention.q_norm.weight"] is None
    assert cuts["embedding.weight"] == cuts["head.weight"] == 0


def test_initial_values_and_decay():
    """Matrices are normal and decay, the two that write to the stream are scaled; norms are ones, biases zeros."""
    for row in table_of(bias="all", norm="layernorm", positions="learned").values():
        if row.name.endswith(".bias"):
            expected = "zeros"
        elif len(row.shape) == 1:
            expected = "ones"
        else:
            expected = (
                "residual" if row.name.split(".", 2)[-1] in ("attention.o.weight", "mlp.down.weight") else "normal"
            )
        assert row.init == expected
        assert row.decay == (len(row.shape) > 1)
    unscaled = table_of(init_depth_scaling=False).values()
    assert {row.init for row in unscaled} == {"normal", "ones"}
