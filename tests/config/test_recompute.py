"""Recomputation by block: which blocks rules are for, what is refused, and what the planner makes of them."""

from __future__ import annotations

from typing import Any

import pytest

from megalite.architecture.costs import mlp_gradient_bytes
from megalite.config.plan import make_plan
from megalite.config.recompute import recompute_by_block
from megalite.config.schema import Config
from megalite.config.validate import validate
from megalite.errors import ConfigError
from megalite.planner.block_memory import block_activations, rotation_bytes
from megalite.planner.memory import memory_by_stage
from tests.kit.spawn import run_ranks
from tests.kit.train import tiny_config, train

NONE, SOME, FULL = "none", "selective", "full"


def config_of(rules: list[dict[str, Any]], pp: int = 1, **sections: dict[str, Any]) -> Config:
    """A tiny run of 4 blocks."""
    options = {"recompute_layers": rules, **sections.pop("train", {})}
    return tiny_config(train=options, parallel={"pp": pp}, **sections)


@pytest.mark.parametrize(
    ("rules", "pp", "wanted"),
    [
        ([], 1, (NONE,) * 4),
        ([{"blocks": [0, 3]}], 1, (FULL, NONE, NONE, FULL)),
        ([0, 3], 1, (FULL, NONE, NONE, FULL)),
        ([{"every": 2}], 1, (FULL, NONE, FULL, NONE)),
        ([{"every": 3, "mode": SOME}], 2, (SOME, NONE, NONE, SOME)),
        ([{"first": 1}], 1, (FULL, NONE, NONE, NONE)),
        ([{"first": 1}], 2, (FULL, NONE, FULL, NONE)),
        ([{"first": 2, "mode": SOME}, {"blocks": [0]}], 2, (FULL, SOME, SOME, SOME)),
    ],
)
def test_which_blocks(rules, pp, wanted):
    """By number, each so-manieth, and the first of each stage; the last rule that names a block holds."""
    config = config_of(rules, pp)
    validate(config, pp)
    plan = make_plan(config, pp)
    if pp == 2:
        assert plan.chunk_blocks == ((0, 2), (2, 4))
    assert recompute_by_block(config, plan) == wanted


def test_blocks_that_predict_further_count_on():
    """They have numbers behind the model's blocks, and what `train.recompute` says unless they are named."""
    model = {"mtp": {"num_layers": 2}}
    config = config_of([{"blocks": [5]}], model=model)
    validate(config, 1)
    assert recompute_by_block(config, make_plan(config, 1)) == (NONE,) * 5 + (FULL,)


@pytest.mark.parametrize(
    ("rules", "train_options", "complaint"),
    [
        ([{}], {}, "train.recompute_layers.0: found no blocks; give one of blocks, every and first"),
        ([{"blocks": [0], "every": 2}], {}, "train.recompute_layers.0: found blocks and every"),
        ([{"blocks": [1]}, {"blocks": [4, 7]}], {}, "train.recompute_layers.1.blocks: there is no block 4 or 7"),
        ([{"blocks": [1, 1]}], {}, "which names a block twice"),
        ([{"first": 5}], {}, "train.recompute_layers.0.first: 5 is more than num_layers=4"),
        ([{"every": 2}], {"recompute": "full"}, "train.recompute_layers.0.mode: these blocks have full without it"),
        ([{"every": 2}], {"recompute": "selective", "mlp_chunk_tokens": 8}, "recompute=selective keeps the results"),
        ([{"every": 2}], {"offload_activations": True}, "train.offload_activations: found with recompute=none; what"),
    ],
)
def test_what_is_refused(rules, train_options, complaint):
    """Rules without blocks, with blocks that are not there, without effect, and settings that need other modes."""
    with pytest.raises(ConfigError) as caught:
        validate(config_of(rules, train=train_options), 1)
    assert complaint in str(caught.value)


def test_memory_is_that_of_each_block():
    """Activations of a stage are those that its blocks keep, each by its mode, tables of the rotation, one block that
    comes back whole, and the gradients of its MLP."""
    large = {"batch": {"seq_len": 512, "micro_batch_size": 2, "global_batch_size": 2}}
    config = config_of([{"every": 2}, {"mode": SOME, "blocks": [1]}], **large)
    plan, tokens = make_plan(config, 1), 2 * 512
    (whole,), (some,), (stream,) = (block_activations(config, plan, (0,), mode) for mode in (NONE, SOME, FULL))
    (found,) = memory_by_stage(config, plan)
    gradients = mlp_gradient_bytes(plan.model.blocks[0].feed_forward, element_bytes=4)
    kept = stream + some + stream + whole + rotation_bytes(plan)
    assert found.activations == tokens * (kept + (whole - stream) + gradients)


LAYOUTS = [
    {"parallel": {"tp": 2, "sequence_parallel": True}},
    {"parallel": {"pp": 2, "zero_stage": 1, "schedule": "zb-h1"}},
    {"parallel": {"cp": 2}},
]
RULES = [{"mode": "full", "first": 1}, {"mode": "selective", "blocks": [1]}]


def train_both(layouts: list[dict[str, Any]]) -> list[tuple[list[tuple[float, float]], ...]]:
    options = ({}, {"recompute_layers": RULES})
    return [tuple(train(tiny_config(**layout, train=each), 3) for each in options) for layout in layouts]


def test_curves_are_bit_equal():
    """Three steps with rules are those without, bit by bit, over tp, cp, and a pipeline that splits
    backward passes."""
    for rank in run_ranks(train_both, 2, LAYOUTS):
        for without, with_rules in rank:
            assert without == with_rules
