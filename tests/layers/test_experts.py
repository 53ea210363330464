"""Experts against a loop over tokens, cut over ranks against whole ones, and their products against plain ones."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.architecture.architecture import ExpertsSpec
from megalite.architecture.settings import MoeConfig
from megalite.layers.capacity import find_room, room_for
from megalite.layers.documents import Documents
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
    experts = layer.experts
    expand, down = (getattr(experts, name).unflatten(0, (EXPERTS, -1)) for name, _ in experts.by_name())
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


class TestCapacity:
    """Which choices find room, by brute force; and that what does not is not there."""

    SETTINGS = MoeConfig(num_experts=EXPERTS, ffn_hidden_size=FFN, capacity_factor=0.8)
    LENGTH = 6  # two sequences and a piece of padding in the stream

    def documents(self) -> Documents:
        positions = torch.arange(NUM_TOKENS) % self.LENGTH
        borders = torch.tensor([*range(0, NUM_TOKENS, self.LENGTH), NUM_TOKENS], dtype=torch.int32)
        weights = torch.full((NUM_TOKENS,), 0.1)
        return Documents(positions, borders, self.LENGTH, torch.arange(NUM_TOKENS), loss_weights=weights)

    def test_the_largest_weights_find_room(self):
        """Sequence by sequence and expert by expert; of equal ones the first."""
        chosen = torch.randint(EXPERTS, (NUM_TOKENS, 2), generator=torch.Generator().manual_seed(5))
        weights = torch.randint(4, (NUM_TOKENS, 2), generator=torch.Generator().manual_seed(6)) / 4
        room = math.ceil(0.8 * self.LENGTH * 2 / EXPERTS)
        assert room_for(self.SETTINGS, self.LENGTH) == room == 2
        wanted = torch.zeros_like(chosen, dtype=torch.bool)
        places = [(token, slot) for token in range(NUM_TOKENS) for slot in range(2)]
        for token, slot in places:
            rivals = [
                (-weights[other].item(), other)
                for other in places
                if other[0] // self.LENGTH == token // self.LENGTH and chosen[other] == chosen[token, slot]
            ]
            wanted[token, slot] = sorted(rivals).index((-weights[token, slot].item(), (token, slot))) < room
        found = find_room(chosen, weights, self.documents(), self.SETTINGS, rows=SINGLE, cp=SINGLE)
        assert found.tolist() == wanted.tolist()
        assert 0 < (~found).sum() < found.numel() / 2

    def test_exact_shares(self):
        """A factor that has no binary form takes no token more."""
        settings = MoeConfig(num_experts=10, top_k=1, capacity_factor=1.1)
        assert [room_for(settings, length) for length in (1, 100, 200, 1001)] == [1, 11, 22, 111]

    @pytest.mark.parametrize("bias", [False, True])
    def test_dropped_choices_do_nothing(self, bias):
        """Output and gradients are those of all choices with weight 0 for the dropped ones; in evaluation all count."""
        spec = (
            small_model(
                hidden_size=WIDTH,
                bias="all" if bias else "none",
                moe=self.SETTINGS.model_dump() | {"shared_ffn_hidden_size": 0},
            )
            .blocks[0]
            .feed_forward
        )
        layer = SparseMLP(WIDTH, spec, tp=SINGLE, sequence_parallel=False).double()
        fill_randomly(layer)
        x, grad = (draw((NUM_TOKENS, WIDTH), torch.float64, seed) for seed in (1, 2))
        kept = layer.router(x, self.documents()).kept
        results = []
        for mixes in ("without", "with"):
            layer.zero_grad()
            mine = x.clone().requires_grad_()
            if mixes == "without":
                y = layer(mine, self.documents())
            else:
                routing = layer.router(mine)
                y, _ = layer.mix(mine, routing._replace(weights=routing.weights * kept))
            y.backward(grad)
            results.append([y.detach(), mine.grad, *(parameter.grad for parameter in layer.parameters())])
        for found, wanted in zip(*results, strict=True):
            assert difference(found, wanted) < TOLERANCE
        layer.eval()
        assert layer.router(x, self.documents()).kept is None


SIZES = ([3, 0, 5, 1], [0, 0, 9, 0], [0, 0, 0, 0], [4, 1, 1, 3])


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("hands_over", [False, True])
def test_grouped_products(sizes, hands_over):
    """Groups without rows too: products and gradients, returned or handed over and added up."""
    weight = torch.nn.Parameter(draw((4 * 6, 7), torch.float64, 1))
    x = draw((sum(sizes), 7), torch.float64, 2).requires_grad_()
    grad = draw((sum(sizes), 6), torch.float64, 3)
    product, taken = GroupedProduct(PLAIN), []
    if hands_over:
        product.take = taken.append
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
    (made,) = taken
    torch.testing.assert_close(made.make(), torch.cat(wanted_weight))
    total = torch.full_like(weight, 5.0).detach()
    made.begin(total)
    made.add_to(total)
    torch.testing.assert_close(total, 2 * torch.cat(wanted_weight))
