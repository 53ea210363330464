"""What ranks tell each other within a step, in both engines."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from megalite.engine.protocol import StepResult
from tests.kit.batches import step_batches
from tests.kit.spawn import run_ranks
from tests.kit.train import Rank, start_rank, tiny_config

DEEPSPEED_0 = {"zero_stage": 0, "engine": "deepspeed"}
LAYOUTS = [
    {"zero_stage": 0},
    {"zero_stage": 1},
    {"zero_stage": 1, "dp": 1, "pp": 2},
    {"zero_stage": 1, "dp": 1, "tp": 2},
    {"zero_stage": 1, "engine": "deepspeed"},
    {"zero_stage": 2},
    {"zero_stage": 3, "engine": "deepspeed"},
    {"zero_stage": 3, "engine": "fsdp2"},
]
CASES = [(DEEPSPEED_0, "fp32"), *((layout, dtype) for layout in LAYOUTS for dtype in ("fp32", "bf16"))]
"""DeepSpeed's ZeRO-0 is refused in half precision."""


def step(rank: Rank, *ask: Any) -> StepResult:
    batch = rank.config.batch
    sizes = {"global_batch_size": batch.global_batch_size, "micro_batch_size": batch.micro_batch_size}
    places = {"dp": rank.plan.dp, "dp_rank": rank.axes.batch.rank}
    shapes = {"seq_len": batch.seq_len, "vocab_size": rank.plan.model.vocab_size}
    return rank.engine.train_step(step_batches(0, **sizes, **places, **shapes), 1e-3, *ask)


def told(parallel: dict[str, Any], dtype: str) -> tuple[list[int], list[int], list[int]]:
    """With numbers to tell, without, and with others after that."""
    rank = start_rank(tiny_config(parallel=parallel, precision={"dtype": dtype}))
    mine = dist.get_rank() + 1
    asked = (lambda: [mine, 65535**2, 7],), (), (lambda: [10 * mine],)
    first, second, third = (list(step(rank, *ask).told) for ask in asked)
    return first, second, third


@pytest.mark.parametrize(("parallel", "dtype"), CASES, ids=str)
def test_numbers_are_added_up_over_all_ranks(parallel, dtype):
    """Exactly, up to squares of 16 bits, whatever the format of the weights."""
    assert run_ranks(told, 2, parallel, dtype) == [([3, 2 * 65535**2, 14], [], [30])] * 2
