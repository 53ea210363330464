"""The planner's clock against published runs."""

from __future__ import annotations

import pytest

from megalite.config.plan import derive_dp
from megalite.planner.backtest import backtest, fit_all, median_error
from megalite.planner.estimate import usable_memory
from megalite.planner.machines import load_machine
from megalite.planner.memory import memory_by_stage
from megalite.planner.published import RUNS, UNSEEN

BEYOND = {
    ("MPT 30B on 8, 8192 tokens", "h100-sxm", "llm-foundry-2023"): 0.22,
    ("MPT 30B on 8, 8192 tokens", "a100-80g", "llm-foundry-2023"): 0.27,
    ("MPT 13B on 8, 2048 tokens", "a100-40g", "llm-foundry-2023"): 0.12,
    ("MPT 13B on 8, 1024 tokens", "a100-40g", "llm-foundry-2023"): 0.13,
    ("MPT 70B on 64, 2048 tokens", "a100-40g", "llm-foundry-2023"): 0.46,
    ("MPT 1B on 32, 2048 tokens", "a100-40g", "llm-foundry-2023"): 0.19,
}
"""Of llm-foundry's 101 runs those that are off by more than a tenth when they are left out, and how far at most
(docs/benchmarks/plan.md says why). No other run is."""
KEEP_LESS = ("megatron-bridge-25.09", "meta-2024")
"""Software that keeps less for the backward pass than megalite does, whose memory the planner counts."""


def test_published_runs():
    """Left out of what predicts it, a run is met within 3 % in the median, and within 10 % but for six; constants of
    the machines' files are those that fit."""
    found = backtest()
    every = [each for tests in found.values() for each in tests]
    assert len(every) == len(RUNS) + len(UNSEEN) == 146
    assert median_error(every) <= 0.03
    beyond = {
        (each.run.name, each.run.machine, each.run.software): abs(each.error_left_out)
        for each in every
        if abs(each.error_left_out) > 0.10
    }
    assert beyond.keys() == BEYOND.keys()
    assert all(off < BEYOND[key] for key, off in beyond.items())
    for (machine, software), constants in fit_all().items():
        stated = load_machine(machine).others[software].model_dump()
        assert stated == pytest.approx(constants.model_dump(), rel=0.02)


def test_what_has_run_fits():
    """Every published run, into the memory of its GPUs; but for one whose table does not say what it recomputed, and
    for software that keeps less than ours."""
    for run in (each for each in RUNS + UNSEEN if each.name != "GPT 462B" and each.software not in KEEP_LESS):
        most = max(stage.total for stage in memory_by_stage(run.config, run.plan, run.practice))
        assert most < usable_memory(load_machine(run.machine)), run.name


def test_runs_are_as_published():
    """Model sizes by their names, and layouts that multiply to their GPUs."""
    sizes = {"1.7B": 1.7e9, "7.5B": 7.5e9, "39.1B": 39.1e9, "145.6B": 145.6e9, "529.6B": 529.6e9, "22B": 22e9}
    sizes |= {"3.6B": 3.6e9, "18.4B": 18.4e9, "76.1B": 76.1e9, "310.1B": 310.1e9, "1008B": 1008e9}
    sizes |= {"530B": 530e9, "16B": 16e9, "70B": 70e9, "177B": 177e9, "462B": 462e9}
    of_mpt = {"1B": 1.316e9, "3B": 2.652e9, "7B": 6.659e9, "13B": 12.854e9, "30B": 29.975e9, "70B": 64.862e9}
    of_others = {"BLOOM 176B": 176.25e9, "Llama 3 8B": 8.03e9, "Llama 3 70B": 70.55e9, "Llama 3 405B": 405.85e9}
    for run in RUNS + UNSEEN:
        family, size, *_ = run.name.split()
        if family in ("BLOOM", "Llama"):
            (expected,), off = {number for name, number in of_others.items() if run.name.startswith(name)}, 0.001
        else:
            expected, off = (of_mpt[size], 0.015) if family == "MPT" else (sizes[size], 0.06)
        assert run.plan.num_parameters == pytest.approx(expected, rel=off), run.name
        parallel = run.config.parallel
        assert parallel.tp * parallel.pp * parallel.cp * derive_dp(run.config, run.world_size) == run.world_size
        assert run.plan.grad_accum_steps >= 1
