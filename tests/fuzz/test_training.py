"""Any model trains in any layout as on one rank, and goes on in any other from its checkpoint.

The seed is the same for every commit: what a chance finds here is found by `make fuzz`, and not in somebody's change.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fuzz.draw import Run, Sections, draw_other_layout, draw_run
from tests.kit.spawn import RanksFailed, run_ranks
from tests.kit.train import Rank, start_rank, tiny_config

STEPS, SAVED = 4, 2
LOSS_TOLERANCE = 2e-5
"""Relative, fp32: sums in another order, over few steps."""
NORM_TOLERANCE = 3e-4
CASES_A_RUN = 10
"""Of `--fuzz`: a run takes as long as thousands of configs."""

Curve = list[tuple[float, float]]


def evaluated(rank: Rank) -> tuple[float, float]:
    """Loss of sequences that are not trained on."""
    found = rank.engine.eval_step(rank.batches(99))
    return found.total / found.weight, 0.0


def trained(sections: Sections, checkpoints: Path | None) -> tuple[Curve, Path | None]:
    """An evaluation, four steps and another, and a checkpoint of the second step."""
    rank = start_rank(tiny_config(**sections))
    curve = [evaluated(rank), *rank.train(0, SAVED)]
    saved = None if checkpoints is None else rank.save(checkpoints, SAVED)
    curve += [*rank.train(SAVED, STEPS), evaluated(rank)]
    rank.engine.close()
    return curve, saved


def resumed(sections: Sections, checkpoint: Path) -> tuple[Curve, None]:
    """The steps behind a checkpoint, and an evaluation."""
    rank = start_rank(tiny_config(**sections), checkpoint)
    curve = [*rank.train(SAVED, STEPS), evaluated(rank)]
    rank.engine.close()
    return curve, None


def outcome(function: Callable, run: Run, sections: Sections, expected: Curve, *args: Path | None) -> tuple[str, Path]:
    """What is wrong with a run's curve, empty for nothing; and its checkpoint."""
    try:
        curve, saved = run_ranks(function, run.world_size, sections, *args)[0]
    except RanksFailed as error:
        return str(error)[-1500:], Path()
    for (loss, norm), (expected_loss, expected_norm) in zip(curve, expected, strict=True):
        is_same = loss == pytest.approx(expected_loss, rel=LOSS_TOLERANCE)
        if not (is_same and norm == pytest.approx(expected_norm, rel=NORM_TOLERANCE)):
            return f"found {curve}, expected {expected}", Path()
    return "", saved or Path()


def test_random_runs(num_cases: int, request: pytest.FixtureRequest, tmp_path: Path):
    """Losses, gradient norms and evaluations of each against one rank, and again behind a checkpoint in other hands."""
    seed = request.config.getoption("--fuzz-seed") or 0
    failures = []
    for number in range(num_cases // CASES_A_RUN):
        rng = random.Random(f"{seed} {number}")
        run = draw_run(rng)
        other = draw_other_layout(rng, run)
        expected, _ = run_ranks(trained, 1, run.alone, None)[0]
        problem, saved = outcome(trained, run, run.sections, expected, tmp_path / str(number))
        if not problem:
            problem, _ = outcome(resumed, other, other.sections, expected[1 + SAVED :], saved)
        if problem:
            failures.append(f"--fuzz-seed={seed}, run {number}: {run}, then {other}:\n{problem}")
    assert not failures, "\n\n".join(failures)
