"""Which weights decay, which rates they have, which rule updates them and what that keeps."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megalite.architecture.weights import Weight, weight_table
from megalite.config.optimizers import OPTIMIZERS
from megalite.config.schema import OptimizerConfig
from megalite.optim.exchange import Unit
from megalite.optim.groups import rates_of
from megalite.optim.muon import orthogonalize
from megalite.optim.rules import (
    QR_COST,
    rule_of,
    state_bytes,
    state_kinds,
    state_shapes,
    update_multiply_adds,
)
from megalite.optim.soap import Soap
from tests.model.stages import GPT_STYLE, tiny_model

BLOCK_MATRICES = {
    "llama": ("attention.q", "attention.k", "attention.v", "attention.o", "mlp.gate", "mlp.up", "mlp.down"),
    "gpt": ("attention.q", "attention.k", "attention.v", "attention.o", "mlp.up", "mlp.down"),
}
STYLES: dict[str, dict[str, Any]] = {"llama": {"qk_norm": True}, "gpt": GPT_STYLE}


def names_by_decay(settings: dict[str, Any], **options: Any) -> dict[float, set[str]]:
    """Names of a two-block model's weights by their decay."""
    optimizer, names = OptimizerConfig(weight_decay=0.1, **options), {}
    for weight in weight_table(tiny_model(**settings)).values():
        names.setdefault(rates_of(weight, optimizer, tiny_model()).weight_decay, set()).add(weight.name)
    return names


def matrices(style: str) -> set[str]:
    return {f"blocks.{block}.{name}.weight" for block in range(2) for name in BLOCK_MATRICES[style]}


@pytest.mark.parametrize("style", STYLES)
def test_matrices_decay_and_vectors_do_not(style):
    """Matrices, the embedding tables and the head decay; norms (of heads too) and biases do not."""
    names = names_by_decay(STYLES[style])
    tables = {"embedding.weight", "head.weight"} | ({"embedding.positions"} if style == "gpt" else set())
    assert names[0.1] == matrices(style) | tables
    assert all("norm" in name or name.endswith("bias") for name in names[0.0])


@pytest.mark.parametrize("style", STYLES)
def test_embeddings_can_be_left_out(style):
    """With decay_embeddings off, only the matrices of the blocks decay, tied or not."""
    for tied in (False, True):
        names = names_by_decay({**STYLES[style], "tie_embeddings": tied}, decay_embeddings=False)
        assert names[0.1] == matrices(style)
        assert "embedding.weight" in names[0.0]


def test_rates_by_kind_and_depth():
    """Factors of tables, head and vectors, times the decay by depth: 1 at the last block, d^n at the embedding."""
    scales = {"embedding": 3.0, "head": 5.0, "vectors": 7.0, "layer_decay": 0.5}
    optimizer, model = OptimizerConfig(lr_scales=scales), tiny_model(num_layers=3)
    table = weight_table(model)
    expected = {
        "embedding.weight": 3.0 * 0.5**3,
        "blocks.0.mlp.up.weight": 0.5**2,
        "blocks.0.mlp_norm.weight": 7.0 * 0.5**2,
        "blocks.2.attention.q.weight": 1.0,
        "final_norm.weight": 7.0,
        "head.weight": 5.0,
    }
    for name, scale in expected.items():
        assert rates_of(table[name], optimizer, model).lr_scale == pytest.approx(scale), name


def test_muon_takes_the_matrices_of_blocks():
    """Tables, head, norms and biases are AdamW's."""
    table = weight_table(tiny_model(**GPT_STYLE)).values()
    optimizer = OptimizerConfig(name="muon")
    assert {weight.name for weight in table if rule_of(weight, optimizer) == "muon"} == matrices("gpt")
    assert {rule_of(weight, optimizer) for weight in table} == {"muon", "adamw"}


@pytest.mark.parametrize(
    ("name", "matrix", "table", "vector"),
    [
        ("adamw", 8.0, 8.0, 8.0),
        ("adamw8bit", 2.0 + 8 / 256, 2.0 + 8 / 256, 8.0),
        ("lion", 4.0, 4.0, 4.0),
        ("adafactor", 4 * (512 + 256) / (512 * 256), 4 * (512 + 256) / (512 * 256), 4.0),
        ("muon", 4.0, 8.0, 8.0),
        ("muon8bit", 1.0 + 4 / 256, 2.0 + 8 / 256, 8.0),
        ("lion8bit", 1.0 + 4 / 256, 1.0 + 4 / 256, 4.0),
        ("soap", 4 * (2 + 2 * (512**2 + 256**2) / (512 * 256)), 8.0, 8.0),
        ("sgd", 4.0, 4.0, 4.0),
        ("schedule_free_adamw", 8.0, 8.0, 8.0),
    ],
)
def test_bytes_of_state(name, matrix, table, vector):
    """Bytes a number of a 512 x 256 matrix in a block, of one outside, and of a vector."""
    optimizer = OptimizerConfig(name=name)
    for shape, layer, expected in (
        ((512, 256), "blocks.0", matrix),
        ((512, 256), "head", table),
        ((512,), "x", vector),
    ):
        assert state_bytes(Weight("w", shape, layer, "w"), optimizer) / prod(shape) == pytest.approx(expected)


def test_all_kinds_are_listed():
    """`state_kinds` is the union of what the weights of a real model have under all optimizers."""
    weights = weight_table(tiny_model(**GPT_STYLE)).values()
    optimizers = [OptimizerConfig(name=name) for name in OPTIMIZERS]
    kinds = {kind for each in optimizers for weight in weights for kind in state_shapes(weight, each)}
    assert kinds == set(state_kinds())


@pytest.mark.parametrize("shape", [(64, 48), (32, 160), (40, 40)])
def test_products_of_a_step(shape: tuple[int, int]):
    """Against those that torch counts: Newton-Schulz iterations, and what SOAP does to a gradient. Torch counts no
    decompositions."""
    weight = Weight("blocks.0.mlp.up.weight", shape, "blocks.0", "")
    muon = OptimizerConfig(name="muon")
    with FlopCounterMode(display=False) as counted:
        orthogonalize(torch.randn(shape), muon.newton_schulz_steps)
    assert counted.get_total_flops() == 2 * update_multiply_adds(weight, muon)
    optimizer = OptimizerConfig(name="soap", precondition_every=1, max_precondition_dim=100)
    unit, soap = Unit(weight, 0, 0, shape[0]), Soap(optimizer)
    soap.start(unit, torch.device("cpu"))
    for step in (1, 2):
        with FlopCounterMode(display=False) as counted:
            soap.direction(unit, torch.randn(shape), step)
    decompositions = sum(QR_COST * side**3 for side in shape if side <= 100)
    assert counted.get_total_flops() == 2 * (update_multiply_adds(weight, optimizer) - decompositions)
    assert update_multiply_adds(weight, OptimizerConfig()) == 0
