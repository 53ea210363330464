"""What a whole run takes: by adding up its steps, one by one."""

from __future__ import annotations

from typing import Any

import pytest

from megalite.config.batch_sizes import batch_sizes
from megalite.config.length_stages import length_stages
from megalite.config.plan import make_plan
from megalite.config.schema import Config
from megalite.planner.estimate import estimate, memory_if_fits
from megalite.planner.machines import load_machine
from megalite.planner.memory import memory_by_stage, on_device
from megalite.planner.practice import OURS
from megalite.planner.whole_run import whole_run

RANKS = 8
MACHINE = load_machine("h100-sxm")


def config_of(steps: int, **batch: Any) -> Config:
    model = {"preset": "llama-1b3", "vocab_size": 32000, "max_positions": 65536}
    sizes = {"micro_batch_size": 4, "global_batch_size": 512, "seq_len": 2048, **batch}
    return Config(model=model, batch=sizes, train={"steps": steps}, parallel={"zero_stage": 1})


def by_steps(config: Config) -> float:
    """Seconds of every step, a smaller batch taking its share of a full one's."""
    sizes, total = batch_sizes(config.batch), 0.0
    for stage in length_stages(config):
        of_step = estimate(stage.config, RANKS, MACHINE).seconds / stage.config.batch.global_batch_size
        total += sum(sizes.size(step) * of_step for step in range(stage.first_step, stage.last_step + 1))
    return total


@pytest.mark.parametrize(
    "batch",
    [
        {},
        {"ramp": {"start_size": 64, "samples": 20_000}},
        {"stages": [{"from_step": 41, "seq_len": 8192, "global_batch_size": 128}]},
        {"stages": [{"from_step": 11, "seq_len": 4096}, {"from_step": 81, "seq_len": 8192, "micro_batch_size": 1}]},
    ],
    ids=["plain", "ramp", "longer", "twice longer"],
)
def test_equals_the_sum_of_its_steps(batch: dict[str, Any]):
    config = config_of(100, **batch)
    found = whole_run(config, RANKS, MACHINE, price=2.0)
    assert found.steps == 100
    assert found.seconds == pytest.approx(by_steps(config))
    assert found.rank_hours == pytest.approx(found.seconds * RANKS / 3600)
    assert found.price == pytest.approx(2.0 * found.rank_hours)
    assert found.megawatt_hours == pytest.approx(found.rank_hours * (MACHINE.watts or 0.0) / 1e6)


def test_a_ramp_costs_no_more_than_its_tokens():
    """As many sequences in smaller steps take as long."""
    grown = config_of(200, ramp={"start_size": 64, "samples": 20_000})
    samples = batch_sizes(grown.batch).first_sample(201)
    plain = whole_run(config_of(200), RANKS, MACHINE).seconds
    assert whole_run(grown, RANKS, MACHINE).seconds == pytest.approx(plain * samples / (200 * 512))


def test_memory_is_that_of_the_longest_sequences():
    """A run whose last stage does not fit does not fit, whatever its first takes."""
    config = config_of(100, stages=[{"from_step": 50, "seq_len": 65536}])
    last = on_device(length_stages(config)[-1].config, "cuda")
    found = estimate(config, RANKS, MACHINE)
    assert found.memory == tuple(each.total for each in memory_by_stage(last, make_plan(last, RANKS)))
    assert not found.fits
    of_gpu = on_device(config, "cuda")
    assert memory_if_fits(of_gpu, make_plan(of_gpu, RANKS), MACHINE, vocab_size=None, practice=OURS) is None
    assert estimate(config_of(100), RANKS, MACHINE).fits
