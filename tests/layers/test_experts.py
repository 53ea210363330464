"""Experts against a loop over tokens, cut over ranks against whole ones, and their products against plain ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.architecture.architecture import ExpertsSpec
from megalite.layers.experts import SparseMLP
from megalite.layers.gemm import PLAIN
from megalite.layers.grouped import GroupedProduct
from megalite.parallel.axes import SINGLE
from tests.layers.parity import (
    NUM_TOKENS,
    Case,
    assert_equal_to_one_process,
    columns,
    complaints,
    difference,
    draw,
    fill_randomly,
    fused_rows,
    whole,
)
from tests.layers.small import small_model

WIDTH, FFN, SHARED, EXPERTS = 16, 12, 20, 5
TOLERANCE = 1e-12
"""float64, the same products in another order."""

KINDS = {
    "softmax": {},
    "softmax, not normalised": {"normalize": False, "top_k": 3},
    "sigmoid, scaled": {"scores": "sigmoid", "scale": 2.5},
    "shared": {"shared_ffn_hidden_size": SHARED},
    "shared, gated": {"shared_ffn_hidden_size": SHARED, "shared_gate": True},
    "one": {"top_k": 1},
    "all": {"top_k": EXPERTS},
    "without a gate": {"activation": "gelu"},
}


def spec_of(kind: str) -> ExpertsSpec:
    moe = {"num_experts": EXPERTS, "ffn_hidden_size": FFN, **KINDS[kind]}
    activation = moe.pop("activation", "swiglu")
    spec = small_model(hidden_size=WIDTH, activation=activation, moe=moe).blocks[0].feed_forward
    assert isinstance(spec, ExpertsSpec)
    return spec


def one_by_one(layer: SparseMLP, spec: ExpertsSpec, x: Tensor) -> Tensor:
    """Token by token, expert by expert."""
    moe, outputs = spec.settings, []
    expand, down = (product.weight.unflatten(0, (EXPERTS, -1)) for product in layer.experts.products)
    for token in x:
        logits = layer.router.weight @ token
        scores = logits.softmax(0) if moe.scores == "softmax" else 1 / (1 + torch.exp(-logits))
        best = sorted(range(EXPERTS), key=lambda index: -scores[index].item())[: moe.top_k]
        total = sum(scores[index] for index in best) if moe.normalize else 1.0
        y = torch.zeros_like(token)
        for index in best:
            inside = expand[index] @ token
            inside = F.silu(inside[:FFN]) * inside[FFN:] if spec.expert.is_gated else F.gelu(inside)
            y = y + moe.scale * scores[index] / total * (down[index] @ inside)
        if layer.shared is not None:
            inside = layer.shared.gate_up.weight @ token
            beside = layer.shared.down.weight @ (F.silu(inside[:SHARED]) * inside[SHARED:])
            if layer.shared_gate is not None:
                beside = beside * torch.sigmoid(layer.shared_gate.weight @ token)
            y = y + beside
        outputs.append(y)
    return torch.stack(outputs)


@pytest.mark.parametrize("kind", KINDS)
def test_experts_equal_a_loop(kind):
    """Output and all gradients."""
    spec = spec_of(kind)
    layer = SparseMLP(WIDTH, spec, tp=SINGLE, sequence_parallel=False).double()
    fill_randomly(layer)
    x, grad = (draw((NUM_TOKENS, WIDTH), torch.float64, seed) for seed in (1, 2))
    results = []
    for run in (layer, lambda x: one_by_one(layer, spec, x)):
        layer.zero_grad()
        mine = x.clone().requires_grad_()
        y = run(mine)
        y.backward(grad)
        results.append([y.detach(), mine.grad, *(parameter.grad for parameter in layer.parameters())])
    for found, wanted in zip(*results, strict=True):
        assert difference(found, wanted) < TOLERANCE


def case(kind: str) -> Case:
    spec = spec_of(kind)
    per_expert = (FFN, FFN) if spec.expert.is_gated else (FFN,)
    return Case(
        build=lambda axis, sp: SparseMLP(WIDTH, spec, tp=axis, sequence_parallel=sp),
        cuts={
            "router.weight": whole,
            "experts.gate_up": fused_rows(*per_expert * EXPERTS),
            "experts.up": fused_rows(*per_expert * EXPERTS),
            "experts.down": columns,
            "shared.gate_up.weight": fused_rows(SHARED, SHARED),
            "shared.down.weight": columns,
            "shared_gate.weight": whole,
        },
        input_shape=(NUM_TOKENS, WIDTH),
        output_shape=(NUM_TOKENS, WIDTH),
        dtypes=(torch.float64,),
    )


def check() -> list[str]:
    return complaints({kind: case(kind) for kind in KINDS})


@pytest.mark.parametrize("world_size", [2, 4])
def test_experts_equal_one_process(world_size):
    """Cut over tensor-parallel ranks, the stream too or not: each rank has a part of each expert."""
    assert_equal_to_one_process(check, world_size)


SIZES = ([3, 0, 5, 1], [0, 0, 9, 0], [0, 0, 0, 0], [4, 1, 1, 3])


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("hands_over", [False, True])
def test_grouped_products(sizes, hands_over):
    """Groups without rows too: products and gradients, returned or handed over and added up."""
    weight = torch.nn.Parameter(draw((4 * 6, 7), torch.float64, 1))
    x = draw((sum(sizes), 7), torch.float64, 2).requires_grad_()
    grad = draw((sum(sizes), 6), torch.float64, 3)
    product, taken = GroupedProduct(weight, PLAIN), []
    if hands_over:
        product.take = lambda parameter, made: taken.append((parameter, made))
    y = product(x, weight, torch.tensor(sizes))
    y.backward(grad)

    parts = zip(x.detach().split(sizes), grad.split(sizes), weight.detach().chunk(4), strict=True)
    wanted_y, wanted_x, wanted_weight = zip(*((a @ w.t(), g @ w, g.t() @ a) for a, g, w in parts), strict=True)
    torch.testing.assert_close(y.detach(), torch.cat(wanted_y))
    torch.testing.assert_close(x.grad, torch.cat(wanted_x))
    if not hands_over:
        torch.testing.assert_close(weight.grad, torch.cat(wanted_weight))
        return
    assert weight.grad is None
    ((parameter, made),) = taken
    assert parameter is weight
    torch.testing.assert_close(made.make(), torch.cat(wanted_weight))
    total = torch.full_like(weight, 5.0).detach()
    made.begin(total)
    made.add_to(total)
    torch.testing.assert_close(total, 2 * torch.cat(wanted_weight))
