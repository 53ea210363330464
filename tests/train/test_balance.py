"""Micro-batches dealt out by speed: the best deal there is, the same training, and less waiting for a slow rank."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
import torch.distributed as dist

from megalite.config.load import load_config
from megalite.config.schema import Config
from megalite.config.shares import deal_out
from megalite.config.validate import validate
from megalite.errors import EXIT_DONE, EXIT_REQUEUE, ConfigError
from megalite.model.transformer import Stage
from megalite.train.components import straggler_timer
from tests.kit.runs import events, metrics, write_run
from tests.train.forked import launch

ROUNDING = 2e-5
"""Of losses near 7: sums of fp32 in another order, over some updates."""

SECONDS_SLOW = 0.06
"""That each micro-batch of the slow rank takes longer."""


@pytest.mark.parametrize("speeds", [(1.0, 1.0), (1.0, 3.0), (2.0, 1.0, 1.5), (0.1, 5.0, 1.0)])
@pytest.mark.parametrize("number", [3, 4, 7, 12])
def test_no_deal_ends_earlier(number: int, speeds: tuple[float, ...]):
    """Against every deal of that many, of which each rank has at least one."""
    found = deal_out(number, speeds)
    assert sum(found) == number
    assert min(found) >= 1
    every = itertools.product(range(1, number + 1), repeat=len(speeds))
    best = min(
        max(count / speed for count, speed in zip(deal, speeds, strict=True)) for deal in every if sum(deal) == number
    )
    assert max(count / speed for count, speed in zip(found, speeds, strict=True)) == pytest.approx(best)


def slow_second_rank() -> None:
    """Let the second rank be as slow as it says it is: four times the other's seconds."""
    is_slow, forward = dist.get_rank() == 1, Stage.forward

    def slowed(self: Stage, *args: object, **kwargs: object) -> object:
        if is_slow and self.training:
            time.sleep(SECONDS_SLOW)
        return forward(self, *args, **kwargs)

    Stage.forward = slowed
    straggler_timer.OwnProduct.seconds = lambda self: 0.04 if is_slow else 0.01


def test_a_slow_rank_takes_less(tmp_path):
    """Even until the first restart, then 7 and 1 of eight; losses and norms are those of an even run, steps are shorter
    by the micro-batches that nobody waits for, and the next restart goes on alike."""
    sizes = {"micro_batch_size": 1, "global_batch_size": 8, "shares": "measured"}
    kept = {"every": 4, "keep_last": 9}
    path = write_run(tmp_path, parallel={"tp": 1, "dp": 2}, batch=sizes, train={"steps": 12}, checkpoint=kept)
    config, even = load_config(path), load_config(path, ["batch.shares=even", f"run.dir={tmp_path}/even"])
    assert launch(config, 2, stop_after=4, prepare=slow_second_rank) == EXIT_REQUEUE
    assert launch(config, 2, stop_after=8, prepare=slow_second_rank) == EXIT_REQUEUE
    assert launch(config, 2, prepare=slow_second_rank) == EXIT_DONE
    assert launch(even, 2) == EXIT_DONE
    told = [(event["step"], event["micro_batches"]) for event in events(config.run.dir) if event["event"] == "balance"]
    assert told == [(4, [7, 1]), (8, [7, 1])]
    ours, theirs = (
        np.array([[record["loss"], record["grad_norm"]] for record in metrics(each.run.dir)]) for each in (config, even)
    )
    assert np.abs(ours - theirs).max() <= ROUNDING
    seconds = [record["seconds"] for record in metrics(config.run.dir)]
    before, after = min(seconds[1:4]), min(seconds[5:8])
    assert before - after >= SECONDS_SLOW, (before, after)


REFUSED = [
    (
        {
            "parallel": {"dp": 2, "zero_stage": 3, "engine": "deepspeed"},
            "batch": {"shares": "measured"},
        },
        "batch.shares: found with engine=deepspeed",
    ),
    ({"parallel": {"dp": 2}, "batch": {"shares": (1.0, 2.0, 3.0)}}, "batch.shares: found 3 speeds for dp=2 ranks"),
    (
        {"parallel": {"dp": 2}, "batch": {"shares": "measured", "micro_batch_size": 4}},
        "batch.shares: a step of 8 sequences has one micro-batch of 4 for each of dp=2 ranks",
    ),
]


@pytest.mark.parametrize(("sections", "words"), REFUSED)
def test_refused(sections, words):
    """Engines whose ranks work in step; speeds of other ranks; nothing to deal out."""
    with pytest.raises(ConfigError) as caught:
        validate(Config(**{"train": {"steps": 10}, **sections}), 2)
    assert words in str(caught.value)
