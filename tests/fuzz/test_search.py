"""The planner's search finds the best of all layouts, for any model, machine and software."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from megalite.config.schema import Config
from megalite.config.validate import validate
from megalite.errors import UserError
from megalite.planner.estimate import Estimate
from megalite.planner.machines import Machine, load_machine
from megalite.planner.memory import on_device
from megalite.planner.practice import OURS, Practice
from megalite.planner.search import search
from tests.fuzz.draw import EXPERTS, GROUPS, MODEL, OPTIMIZERS, some
from tests.kit.layouts import best_of_all

CASES_A_SEARCH = 10
"""Of `--fuzz`: a search takes as long as hundreds of configs."""
TOP = 6
OTHERS: tuple[Practice, ...] = (
    replace(OURS, waits_for_stages=True, fused_attention=False, least_stages_of_chunks=3),
    replace(OURS, divides_sequences=False, divides_weights=False, offloads=False),
)


def draw_config(rng: random.Random) -> Config:
    """Of a model that takes some gigabytes, legal on one rank."""
    while True:
        heads, width = rng.choice((8, 12, 16, 32)), rng.choice((64, 128))
        model: dict[str, Any] = {
            **{name: value for name, value in some(rng, MODEL).items() if name not in ("head_dim", "mup")},
            "hidden_size": heads * width,
            "num_heads": heads,
            "num_kv_heads": rng.choice([each for each in (1, 2, 4, 8, heads) if heads % each == 0]),
            "num_layers": rng.choice((2, 3, 4, 6, 7)),
            "vocab_size": rng.choice((1000, 32000, 50257, 128256)),
            "ffn_hidden_size": rng.choice((1000, 4096, 5504, 11008)),
        }
        if rng.random() < 0.3:
            model["moe"] = {**some(rng, EXPERTS), "ffn_hidden_size": rng.choice((1024, 1408))}
        optimizer = {"name": rng.choice((*OPTIMIZERS, "soap")), "offload": rng.random() < 0.15}
        if rng.random() < 0.25:
            optimizer["groups"] = rng.choice(GROUPS)
        batch = {"global_batch_size": rng.choice((4, 6, 8, 16, 32)), "seq_len": rng.choice((512, 2048, 4096, 16384))}
        precision = {"dtype": rng.choice(("bf16", "bf16", "fp32"))}
        train = {"steps": 5, "compile": rng.choice(("auto", "off"))}
        try:
            config = Config(model=model, batch=batch, optimizer=optimizer, precision=precision, train=train)
            validate(config, 1)
        except (UserError, ValidationError):
            continue
        return config


def draw_machine(rng: random.Random) -> Machine:
    """With more or less memory, other nodes and another network."""
    machine = load_machine(rng.choice(("h100-sxm", "a100-80g", "a100-40g", "h200", "cpu")))
    return machine.model_copy(
        update={
            "memory_gib": rng.choice((6.0, 12.0, 24.0, 80.0)),
            "ranks_per_node": rng.choice((2, 4, 8)),
            "network": machine.network * rng.choice((0.1, 1.0)),
        }
    )


def _figures(layout: Estimate | None) -> tuple[float, int] | None:
    return None if layout is None else (layout.seconds, max(layout.memory))


def test_random_searches(num_cases: int, request: pytest.FixtureRequest):
    """Against judging each layout; and nothing takes less than its bounds."""
    seed = request.config.getoption("--fuzz-seed") or 0
    failures = []
    for number in range(num_cases // CASES_A_SEARCH):
        rng = random.Random(f"{seed} {number}")
        base, world_size, machine = draw_config(rng), rng.choice((2, 4, 6, 8, 12)), draw_machine(rng)
        base, practice = on_device(base, machine.device_type), rng.choice((OURS, OURS, *OTHERS))
        try:
            expected = best_of_all(base, world_size, machine, practice, top=TOP)
            best = search(base, world_size, machine, top=TOP, practice=practice).best
            (quickest,) = search(base, world_size, machine, top=1, practice=practice).best or (None,)
            assert [each.seconds for each in best] == sorted(each.seconds for each in expected)
            assert {max(each.memory) for each in best} == {max(each.memory) for each in expected}
            first = expected[0] if expected else None  # of the mesh that is quickest, if another one is leaner
            assert _figures(quickest) == _figures(first)
        except AssertionError as error:
            failures.append(f"--fuzz-seed={seed}, search {number}, {world_size} ranks: {base}, {practice}:\n{error}")
    assert not failures, "\n\n".join(failures)
