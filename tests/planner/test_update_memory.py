"""What an update has beside weights, gradients and state: a batch's, or a round's, however large the model."""

from __future__ import annotations

from typing import Any

import pytest

from megalite.config.plan import make_plan
from megalite.config.schema import Config
from megalite.optim.at_work import AT_ONCE, ROUND_NUMBERS
from megalite.planner.memory import memory_by_stage
from megalite.planner.update_memory import update_bytes_by_stage

SMALL = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "ffn_hidden_size": 256, "vocab_size": 512}
IN_BLOCK = 4 * 64 * 64 + 3 * 64 * 256
IN_ALL = 2 * (IN_BLOCK + 2 * 64) + 2 * 512 * 64 + 64
LARGE = {"hidden_size": 4096, "num_layers": 32, "num_heads": 32, "ffn_hidden_size": 11008, "vocab_size": 32000}


def update_bytes(
    name: str, ranks: int = 1, model: dict[str, Any] = SMALL, offload: bool = False, **optimizer: Any
) -> tuple[int, ...]:
    """On a rank of each stage, in fp32."""
    config = made(name, ranks, model, offload=offload, **optimizer)
    return update_bytes_by_stage(config, make_plan(config, ranks))


def made(name: str, ranks: int, model: dict[str, Any], *, offload: bool = False, **optimizer: Any) -> Config:
    """Of so many replicas under ZeRO 1."""
    return Config(
        model=model,
        batch={"micro_batch_size": 1, "global_batch_size": ranks, "seq_len": 128},
        optimizer={"name": name, "offload": offload, **optimizer},
        precision={"dtype": "fp32"},
        train={"steps": 1},
    )


def test_elementwise_rules_by_hand():
    """AdamW's kernel has nothing; Lion signs; a coupled decay is a gradient more; what is frozen is not updated."""
    assert update_bytes("adamw") == (0,)
    assert update_bytes("lion") == (4 * IN_ALL,)
    assert update_bytes("lion", 2) == (4 * IN_ALL // 2,)
    assert update_bytes("adamw", decay={"kind": "coupled"}) == (4 * IN_ALL,)
    frozen = [{"match": ["embedding.*", "head.*", "*norm*"], "frozen": True}]
    assert update_bytes("lion", groups=frozen) == (4 * 2 * IN_BLOCK,)


def test_muon_alone_by_hand():
    """The momentum that goes on, two more of the largest matrix, and two squares of its short side."""
    assert update_bytes("muon") == (4 * (3 * 64 * 256 + 2 * 64 * 64),)


@pytest.mark.parametrize("name", ["lion", "sgd", "schedule_free_adamw"])
def test_a_batch_bounds_elementwise_rules(name: str):
    assert update_bytes(name, model=LARGE) == (4 * AT_ONCE,)


@pytest.mark.parametrize("name", ["muon", "adamw8bit", "adafactor"])
def test_a_round_bounds_whole_rules(name: str):
    """The largest unit here is a table of 131 million numbers; a hundred layers more change nothing."""
    longer = {**LARGE, "num_layers": 132}
    largest = max(ROUND_NUMBERS, 32000 * 4096 if name == "adafactor" else 4096 * 11008)
    for ranks in (1, 8):
        (found,) = update_bytes(name, ranks, LARGE)
        assert (found,) == update_bytes(name, ranks, longer)
        assert 0 < found <= 4 * 5 * largest


def test_an_update_on_the_host_takes_the_hosts_memory():
    config = made("lion", 1, SMALL, offload=True)
    (offloaded,) = memory_by_stage(config, plan := make_plan(config, 1))
    assert update_bytes_by_stage(config, plan) == (4 * IN_ALL,)
    of_adamw = made("adamw", 1, SMALL, offload=True)
    (without,) = memory_by_stage(of_adamw, make_plan(of_adamw, 1))
    assert offloaded.total == without.total
    assert offloaded.host == without.host  # a moment less, and its results
