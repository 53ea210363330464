"""Optimizer state of groups of weights, whose names set blocks apart that are alike otherwise."""

from __future__ import annotations

from math import prod

import pytest

from megalite.architecture.weights import weight_table
from megalite.config.plan import make_plan
from megalite.planner.memory import rounded_bytes_by_stage, state_bytes_by_stage, state_bytes_per_parameter
from tests.kit.train import tiny_config


def test_state_of_groups_is_counted_by_name():
    """A frozen block has no state, its like has: eight bytes a parameter of what is left."""
    config = tiny_config(optimizer={"groups": [{"match": "blocks.0.*", "frozen": True}]})
    plan = make_plan(config, 1)
    table = weight_table(plan.model).values()
    left = sum(prod(weight.shape) for weight in table if weight.layer != "blocks.0")
    assert state_bytes_by_stage(config, plan) == (8 * left,)
    whole = sum(prod(weight.shape) for weight in table)
    assert state_bytes_per_parameter(config, plan) == pytest.approx(8 * left / whole)


def test_rounded_weights_of_kept_blocks_are_not_counted():
    """Blocks that are alike, of which the first keeps its weights: what is rounded of the second alone."""
    qat = {"bits": 8, "group_size": None}
    both, second = (
        tiny_config(precision={"qat": {**qat, "keep_first_blocks": kept}}, model={"num_layers": 2}) for kept in (0, 1)
    )
    sizes = [rounded_bytes_by_stage(config, make_plan(config, 1))[0] for config in (both, second)]
    assert sizes[0] == 2 * sizes[1] > 0
