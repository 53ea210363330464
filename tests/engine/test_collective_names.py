"""Names of the collectives that steps call, which gloo has to have room for."""

from __future__ import annotations

from typing import Any

import torch

from tests.kit.spawn import run_ranks
from tests.kit.train import tiny_config, train

BF16 = {"precision": {"dtype": "bf16"}}
FSDP2 = {"zero_stage": 3, "engine": "fsdp2"}


def names_of_collectives(cases: list[dict[str, Any]]) -> set[str]:
    """All operations of torch.distributed in a step of each case."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for case in cases:
            train(tiny_config(**case), 1)
    return {name for event in profile.profiler.kineto_results.events() if (name := event.name()).startswith("c10d::")}


def test_no_collective_over_gloo_has_a_long_name():
    """Gloo's threads write the name of what they did last into one string without a lock: one of 16 letters or more
    ends the process now and then. `ALLGATHER_COALESCED` is the functional all-gather's, and a coalesced one's."""
    cases = [
        *({"parallel": {"dp": 2, "zero_stage": stage}} for stage in range(4)),
        {"parallel": {"tp": 2, "sequence_parallel": True}},
        {"parallel": {"tp": 2, "sequence_parallel": True}, "train": {"recompute": "selective"}},
        {"parallel": {"pp": 2}},
        {"parallel": {"dp": 2}, "optimizer": {"name": "muon"}},
        {"parallel": {"dp": 2, "zero_stage": 3, "engine": "deepspeed"}, **BF16},
        {"parallel": {"dp": 2, **FSDP2}, **BF16},
    ]
    for found in run_ranks(names_of_collectives, 2, cases, backend="gloo"):
        assert {"c10d::allreduce_", "c10d::_allgather_base_"} <= found
        assert not [name for name in found if "gather" in name and "coalesced" in name], found
