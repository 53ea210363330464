"""Batches that change their size in mid-run: every engine accumulates as one process over the whole batch does."""

from __future__ import annotations

import pytest

from megalite.config.batch_sizes import BatchSizes
from tests.engine.test_layouts import LOSS_TOLERANCE, NORM_TOLERANCE
from tests.kit.batches import micro_batch
from tests.kit.spawn import run_ranks
from tests.kit.train import start_rank, tiny_config

SIZES = BatchSizes.fixed(4).changed(3, 8).changed(5, 16).changed(6, 4)
"""Steps 1 and 2 with 4 sequences, 3 and 4 with 8, 5 with 16, 6 and 7 with 4 again."""
STEPS = 7

LAYOUTS = {
    2: [*({"dp": 2, "zero_stage": stage} for stage in range(4)), {"tp": 2, "zero_stage": 2}, {"pp": 2}],
    4: [
        {"pp": 2, "dp": 2, "zero_stage": 0},
        {"tp": 2, "dp": 2, "zero_stage": 3, "engine": "deepspeed"},
    ],
}


def curve(layouts: list[dict], micro_batch_size: int) -> list[list[tuple[float, float]]]:
    """Loss and norm of each step, layout by layout, with masks and documents of uneven lengths."""
    curves = []
    for parallel in layouts:
        rank = start_rank(tiny_config(parallel={"zero_stage": 1, **parallel}))
        dp, found = rank.axes.batch, []
        for step in range(1, STEPS + 1):
            starts = range(SIZES.first_sample(step), SIZES.first_sample(step + 1), micro_batch_size)
            batches = [
                micro_batch(range(start, start + micro_batch_size), seq_len=16, vocab_size=101)
                for start in list(starts)[dp.rank :: dp.size]
            ]
            result = rank.engine.train_step(batches, 1e-3)
            found.append((result.loss, result.grad_norm))
        rank.engine.close()
        curves.append(found)
    return curves


@pytest.fixture(scope="module")
def truth() -> list[tuple[float, float]]:
    """One process, one sequence at a time."""
    return run_ranks(curve, 1, [{"zero_stage": 0}], 1)[0][0]


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_layouts_agree(world_size, truth):
    """Loss and gradient norm of every step, at ZeRO 0 to 3, over tp and in a pipeline."""
    for curves in run_ranks(curve, world_size, LAYOUTS[world_size], 2):
        for parallel, found in zip(LAYOUTS[world_size], curves, strict=True):
            for step, ((loss, norm), (true_loss, true_norm)) in enumerate(zip(found, truth, strict=True), start=1):
                assert loss == pytest.approx(true_loss, abs=LOSS_TOLERANCE), (parallel, step)
                assert norm == pytest.approx(true_norm, rel=NORM_TOLERANCE), (parallel, step)
