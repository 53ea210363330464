"""In how many rounds a step goes is nothing that a weight could tell: the same bits, and less memory at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megalite.optim import exchange, rounding, rules, slices
from tests.kit.spawn import run_ranks
from tests.kit.train import start_rank, tiny_config

NAMES = ("adamw", "lion", "sgd", "schedule_free_adamw", "muon", "soap", "adafactor", "adamw8bit", "muon8bit")
LAYOUTS = ({"dp": 2, "zero_stage": 1}, {"tp": 2}, {"dp": 2, "engine": "fsdp2", "zero_stage": 3})


FEW = {"model": {"num_layers": 2}, "batch": {"micro_batch_size": 4}}
"""A gradient is whatever it is: two layers and one or two micro-batches make one."""


def weights_after(cases: list[dict[str, Any]], numbers: int | None) -> list[dict[str, torch.Tensor]]:
    """Of this rank after two steps, where so many numbers are a round and a batch; None for as many as there are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "UNIT_NUMBERS", 1500)  # a weight of several units, a slice of several rounds
        if numbers is not None:
            patch.setattr(exchange, "ROUND_NUMBERS", numbers)
            for module in (slices, rounding):
                patch.setattr(module, "AT_ONCE", numbers)
        return [_trained(sections) for sections in cases]


def _trained(sections: dict[str, Any]) -> dict[str, torch.Tensor]:
    rank = start_rank(tiny_config(**sections))
    rank.train(0, 2)
    return {each.local.weight.name: each.tensors["weight"].clone() for each in rank.engine.local_weights()}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_rounds_change_nothing(layout: dict[str, Any]):
    """One unit a round, and batches that cut weights anywhere, give the weights of a step that is all at once."""
    cases = [{"optimizer": {"name": name, "weight_decay": 0.1}, "parallel": layout, **FEW} for name in NAMES]
    whole = run_ranks(weights_after, 2, cases, None)
    for small in (64, 4096):  # whole vectors of the CPU: it rounds what is left over otherwise
        for of_whole, of_cut in zip(whole, run_ranks(weights_after, 2, cases, small), strict=True):
            for name, expected, found in zip(NAMES, of_whole, of_cut, strict=True):
                different = [key for key in expected if not torch.equal(expected[key], found[key])]
                assert not different, f"{name}, {small} at once: {different}"
