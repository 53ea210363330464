"""An engine that is closed gives all of its memory back, also where another one follows in the same process."""

from __future__ import annotations

import gc
import weakref

from tests.kit.spawn import run_ranks
from tests.kit.train import start_rank, tiny_config

ENGINES = (
    {"engine": "native", "zero_stage": 0},
    {"engine": "native", "zero_stage": 1},
    {"engine": "fsdp2", "zero_stage": 3},
    {"engine": "deepspeed", "zero_stage": 1},
    {"engine": "deepspeed", "zero_stage": 2},
)


def kept_by(parallel: dict) -> int:
    """Parameters that are alive behind an engine's end."""
    rank = start_rank(tiny_config(parallel=parallel))
    rank.train(0, 2)
    seen = [weakref.ref(parameter) for parameter in rank.engine.stage.parameters()]
    rank.engine.close()
    del rank
    gc.collect()
    return sum(each() is not None for each in seen)


def kept() -> list[int]:
    return [kept_by(parallel) for parallel in ENGINES]


def test_nothing_is_kept():
    (found,) = run_ranks(kept, 1)
    assert found == [0] * len(ENGINES), dict(zip(map(str, ENGINES), found, strict=True))
