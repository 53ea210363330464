"""Which experts are chosen, against a search through all choices; and how biases keep a balance."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from megalite.architecture.settings import MoeConfig
from megalite.layers.router import Router, choose
from megalite.layers.routers import Routers
from megalite.parallel.axes import SINGLE

CASES = {
    "plain": {"num_experts": 6, "top_k": 2},
    "the best group": {"num_experts": 6, "top_k": 2, "num_groups": 3},
    "two groups": {"num_experts": 8, "top_k": 3, "num_groups": 4, "top_groups": 2},
    "by the best two": {"num_experts": 8, "top_k": 3, "num_groups": 4, "top_groups": 2, "group_score": "sum_of_two"},
    "groups of one": {"num_experts": 4, "top_k": 2, "num_groups": 4, "top_groups": 2, "group_score": "sum_of_two"},
    "all groups": {"num_experts": 8, "top_k": 5, "num_groups": 2, "top_groups": 2},
}


def by_search(ranked: list[float], moe: MoeConfig) -> list[int]:
    """The best groups, then the best choice of experts from these, by trying all."""
    size = moe.num_experts // moe.num_groups
    groups = [range(start, start + size) for start in range(0, moe.num_experts, size)]
    counted = 2 if moe.group_score == "sum_of_two" else 1

    def worth(group: range) -> float:
        return sum(sorted((ranked[index] for index in group), reverse=True)[:counted])

    allowed = groups
    if moe.num_groups > 1:
        allowed = max(itertools.combinations(groups, moe.top_groups), key=lambda some: sum(map(worth, some)))
    candidates = [index for group in allowed for index in group]
    best = max(itertools.combinations(candidates, moe.top_k), key=lambda some: sum(ranked[index] for index in some))
    return sorted(best, key=lambda index: -ranked[index])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_best_are_chosen(name, has_bias):
    """Of the best groups, whatever sign a score has with its bias."""
    moe = MoeConfig(**CASES[name])
    generator = torch.Generator().manual_seed(3)
    scores = torch.rand(50, moe.num_experts, generator=generator)
    bias = torch.randn(moe.num_experts, generator=generator) if has_bias else None
    found = choose(scores, bias, moe)
    ranked = scores if bias is None else scores + bias
    assert found.tolist() == [by_search(row, moe) for row in ranked.tolist()]


def test_a_bias_moves_choices_and_nothing_else():
    """It counts in the choice; the weights are those of the scores without it."""
    moe = MoeConfig(num_experts=3, top_k=1, normalize=False, bias_rate=0.1)
    router = Router(2, moe, tp=SINGLE, sequence_parallel=False)
    nn.init.normal_(router.weight)
    x = torch.randn(5, 2)
    router.bias = torch.tensor([0.0, 0.0, 5.0])
    routing = router(x)
    assert routing.chosen.flatten().tolist() == [2] * 5
    torch.testing.assert_close(routing.weights.flatten(), (x @ router.weight.t()).softmax(-1)[:, 2])


def test_biases_move_towards_a_balance():
    """By the rate, against the sign of what an expert has above its share; not at all where it has just that."""
    routers, blocks = made({"num_experts": 4, "top_k": 1, "bias_rate": 0.25})
    (router,) = routers.by_name.values()
    router.noted = torch.tensor([[6.0, 1.0, 3.0, 2.0]])
    routers.end_step(())
    assert router.bias.tolist() == [-0.25, 0.25, 0.0, 0.25]
    assert router.loads.tolist() == [6.0, 1.0, 3.0, 2.0]
    assert router.noted.tolist() == [[0.0] * 4]
    state = routers.state()
    assert state.keys() == {"router_bias/blocks.3.mlp.router", "router_loads/blocks.3.mlp.router"}
    others, _ = made({"num_experts": 4, "top_k": 1, "bias_rate": 0.25})
    others.load(state.get)
    assert all(torch.equal(others.state()[name], tensor) for name, tensor in state.items())
    others.load(lambda name: None)
    assert others.state()["router_bias/blocks.3.mlp.router"].tolist() == [0.0] * 4
    assert "router_loads/blocks.3.mlp.router" not in others.state()
    del blocks


def test_a_step_that_is_left_out_moves_no_bias():
    """Its loads are known all the same, and do not count in the next step."""
    routers, _ = made({"num_experts": 4, "top_k": 1, "bias_rate": 0.25})
    (router,) = routers.by_name.values()
    router.noted = torch.tensor([[6.0, 1.0, 3.0, 2.0]])
    routers.end_step((), is_skipped=True)
    assert router.bias.tolist() == [0.0] * 4
    assert router.loads.tolist() == [6.0, 1.0, 3.0, 2.0]
    assert router.noted.tolist() == [[0.0] * 4]


def test_what_finds_no_room():
    """Is known when the step is over, as a share of all choices; the balance is of what was chosen."""
    routers, _ = made({"num_experts": 4, "top_k": 1, "capacity_factor": 1.0, "bias_rate": 0.25})
    (router,) = routers.by_name.values()
    assert routers.dropped() == {}
    router.noted = torch.tensor([[6.0, 1.0, 3.0, 2.0], [3.0, 0.0, 0.0, 0.0]])
    routers.end_step(())
    assert router.bias.tolist() == [-0.25, 0.25, 0.0, 0.25]
    assert routers.dropped() == {"blocks.3": 0.25}
    assert router.noted.tolist() == [[0.0] * 4] * 2


def test_a_bias_that_stays():
    """With a rate of 0, and there is none without a rate."""
    routers, _ = made({"num_experts": 2, "top_k": 1, "bias_rate": 0.0})
    (router,) = routers.by_name.values()
    router.noted = torch.tensor([[6.0, 1.0]])
    routers.end_step(())
    assert router.bias.tolist() == [0.0, 0.0]
    routers, _ = made({"num_experts": 2, "top_k": 1})
    assert routers.state() == {}


def made(settings: dict) -> tuple[Routers, nn.ModuleDict]:
    block = nn.Module()
    block.mlp = nn.Module()
    block.mlp.router = Router(2, MoeConfig(**settings), tp=SINGLE, sequence_parallel=False)
    blocks = nn.ModuleDict({"3": block})
    return Routers({"blocks": blocks}), blocks
