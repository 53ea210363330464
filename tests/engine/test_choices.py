"""Every token goes to the same experts in every layout, and to those that transformers sends it to."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from megalite.config.plan import make_plan
from tests.engine.test_layouts import BY_BIAS, FEW, FSDP2, FULL, SELECTIVE, experts, latent, layout
from tests.kit.reference import reference_training
from tests.kit.spawn import run_ranks
from tests.kit.train import start_rank, tiny_config

STEPS = 6

Choices = dict[str, dict[int, tuple[int, ...]]]
"""By block the experts of every token, by the token's key."""

MODELS: dict[str, dict[str, Any]] = {
    "softmax": experts(aux_loss=0.02, num_experts=8),
    "groups and a bias": latent(
        {**BY_BIAS, "num_experts": 8, "num_groups": 4, "top_groups": 2, "group_score": "sum_of_two"}
    ),
}
LAYOUTS = {
    1: [layout(more=FULL)],
    2: [
        layout(dp=2, ep=2),
        layout(tp=2, sequence_parallel=True, more={**FEW, **SELECTIVE}),
        layout(cp=2, ep=2),
        layout(dp=2, ep=2, **FSDP2),
        layout(pp=2, schedule="zb-v"),
    ],
    4: [layout(dp=2, ep=2, tp=2, sequence_parallel=True, more=FEW), layout(dp=4, ep=4)],
}


def choices_of(cases: list[dict[str, Any]]) -> list[Choices]:
    """What the routers of this rank choose in some steps, of its own tokens; done again it is the same."""
    found = []
    for case in cases:
        rank, seen = start_rank(tiny_config(**case)), {}
        for name, router in rank.engine.stage.routers.by_name.items():
            router.register_forward_hook(_note(seen.setdefault(name.removesuffix(".mlp.router"), {})))
        rank.train(0, STEPS)
        found.append(seen)
        rank.engine.close()
    return found


def _note(seen: dict[int, tuple[int, ...]]) -> Any:
    def note(router: Any, inputs: Any, routing: Any) -> None:
        keys = router.own(inputs[1].keys, router.tp)
        for key, chosen in zip(keys.tolist(), routing.chosen.sort(1).values.tolist(), strict=True):
            assert seen.setdefault(key, tuple(chosen)) == tuple(chosen), "another choice when it is done again"

    return note


def choices_of_transformers(case: dict[str, Any]) -> Choices:
    config = tiny_config(**case)
    model, seen = make_plan(config, 1).model, list[list[Tensor]]()
    reference_training(config, model, STEPS, seen)
    size = config.batch.global_batch_size * config.batch.seq_len
    sparse = [f"blocks.{index}" for index, is_sparse in enumerate(model.sparse_blocks) if is_sparse]
    return {
        block: {
            step * size + place: tuple(chosen)
            for step, of_step in enumerate(seen)
            for place, chosen in enumerate(of_step[number].sort(1).values.tolist())
        }
        for number, block in enumerate(sparse)
    }


@pytest.mark.parametrize("name", MODELS)
def test_choices_are_those_of_transformers(name: str):
    """Token by token over six steps, in which weights and biases move."""
    (truth,) = run_ranks(choices_of_transformers, 1, layout(more=MODELS[name]))
    assert len({chosen for block in truth.values() for chosen in block.values()}) > 5
    for size, cases in LAYOUTS.items():
        merged = [{**case, "model": MODELS[name]["model"]} for case in cases]
        ranks = run_ranks(choices_of, size, merged)
        for number, case in enumerate(merged):
            found: Choices = {}
            for rank in ranks:
                for block, choices in rank[number].items():
                    found.setdefault(block, {}).update(choices)
            wrong = {
                (block, key): (found[block].get(key), chosen)
                for block, choices in truth.items()
                for key, chosen in choices.items()
                if found[block].get(key) != chosen
            }
            assert not wrong, f"{case['parallel']}: {len(wrong)} choices, {list(wrong.items())[:3]}"
            assert {block: len(choices) for block, choices in found.items()} == {
                block: len(choices) for block, choices in truth.items()
            }
