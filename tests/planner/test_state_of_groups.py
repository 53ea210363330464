"""Optimizer state of groups of weights, whose names set blocks apart that are alike otherwise."""

from __future__ import annotations

from math import prod

import pytest

from megalite.architecture.trained import ALL_GRADIENTS
from megalite.architecture.weights import weight_table
from megalite.config.plan import make_plan
from megalite.config.schema import Config
from megalite.config.trained import block_gradients
from megalite.planner.holdings import numbers_by_stage, rounded_bytes_by_stage, state_bytes_per_parameter
from megalite.planner.memory import memory_by_stage
from tests.kit.train import tiny_config


def test_state_of_groups_is_counted_by_name():
    """A frozen block has no state, its like has: eight bytes a parameter of what is left."""
    config = tiny_config(optimizer={"groups": [{"match": "blocks.0.*", "frozen": True}]})
    plan = make_plan(config, 1)
    table = weight_table(plan.model).values()
    left = sum(prod(weight.shape) for weight in table if weight.layer != "blocks.0")
    assert [each.state_bytes for each in numbers_by_stage(config, plan)] == [8 * left]
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


def test_adapters_alone_have_gradients_and_masters():
    """By hand, of a model with adapters of queries and of what leads down: their numbers, half of what is cut on two
    tensor-parallel ranks; 6 FLOPs for each of them, 4 for every other matrix weight, 6 for attention's products."""
    hidden, ffn, rank, layers, seq_len = 64, 128, 4, 2, 32
    sizes = {"hidden_size": hidden, "ffn_hidden_size": ffn, "num_layers": layers, "num_heads": 4, "vocab_size": 128}
    model = {**sizes, "lora": {"rank": rank, "targets": ["q", "down"]}}
    adapters = layers * rank * (hidden + hidden + ffn + hidden)
    matrices = layers * (4 * hidden * hidden + 3 * hidden * ffn) + 128 * hidden
    for tp, own in ((1, adapters), (2, layers * rank * (hidden + hidden // 2 + ffn // 2 + hidden))):
        given = {"precision": {"dtype": "bf16"}, "parallel": {"tp": tp}, "batch": {"seq_len": seq_len}}
        config = Config(model=model, **given)
        plan = make_plan(config, tp)
        (found,) = numbers_by_stage(config, plan)
        assert (found.trained, found.masters) == (own, own)
        (memory,) = memory_by_stage(config, plan)
        assert (memory.weights, memory.gradients) == (2 * found.parameters, 4 * own)
        assert memory.optimizer - 4 * own == found.state_bytes == 8 * own
        mixing = layers * hidden * seq_len  # queries with keys and weights with values, over half of the sequence
        assert plan.flops_per_token == 4 * matrices + 6 * mixing + 6 * adapters


@pytest.mark.parametrize("placement", ["before", "after", "both", "post"])
@pytest.mark.parametrize(
    ("frozen", "lacking"),
    [
        ("embedding.*", set()),
        ("blocks.*norm.weight", {"norms"}),
        ("blocks.*.attention.?.weight", {"entering", "leaving"}),
        ("blocks.*.attention.q.weight", set()),
        ("blocks.*.mlp.gate.weight", set()),
        ("blocks.*.mlp.*", {"expanding", "contracting"}),
        ("blocks.*.down.weight", {"contracting"}),
    ],
)
def test_gradients_of_a_block_by_what_is_frozen(placement: str, frozen: str, lacking: set[str]):
    """Of fused matrices a gradient is made as long as one of them is trained; wherever the norms are."""
    groups = {"groups": [{"match": frozen, "frozen": True}]}
    config = tiny_config(model={"num_layers": 2, "norm_placement": placement}, optimizer=groups)
    wanted = ALL_GRADIENTS._replace(**dict.fromkeys(lacking, False))
    assert block_gradients(make_plan(config, 1).model, config.optimizer) == (wanted, wanted)
