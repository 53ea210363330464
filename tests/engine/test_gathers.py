"""ZeRO-3 gathers weights in the midst of a block that is recomputed, and not the same ones each time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.spawn import run_ranks
from tests.kit.train import start_rank, tiny_config, train

SELECTIVE = {"train": {"recompute": "selective"}, "parallel": {"engine": "deepspeed", "zero_stage": 3}}
SAME = 1e-6
"""Relative, fp32."""


def evaluated_first(sections: dict) -> list[tuple[float, float]]:
    """The curve of two steps behind an evaluation, which brings the small weights that are kept whole."""
    rank = start_rank(tiny_config(**sections))
    rank.engine.eval_step(rank.batches(9))
    return rank.train(0, 2)


def plain(sections: dict) -> list[tuple[float, float]]:
    return train(tiny_config(**{**sections, "train": {}}), 2)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_recomputed_block_after_an_evaluation(world_size):
    curve, expected = (run_ranks(each, world_size, SELECTIVE)[0] for each in (evaluated_first, plain))
    assert curve == [pytest.approx(each, rel=SAME) for each in expected]


def saved(sections: dict, folder: Path) -> tuple[Path, list[tuple[float, float]]]:
    """A checkpoint of two steps, and the curve of two more."""
    rank = start_rank(tiny_config(**sections))
    rank.train(0, 2)
    return rank.save(folder, 2), rank.train(2, 4)


def resumed(sections: dict, checkpoint: Path) -> list[tuple[float, float]]:
    return start_rank(tiny_config(**sections), checkpoint).train(2, 4)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_recomputed_block_after_a_checkpoint_is_loaded(world_size, tmp_path):
    checkpoint, expected = run_ranks(saved, world_size, SELECTIVE, tmp_path)[0]
    curve = run_ranks(resumed, world_size, SELECTIVE, checkpoint)[0]
    assert curve == [pytest.approx(each, rel=SAME) for each in expected]
