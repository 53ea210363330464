"""kill -9 at random moments of a save: the run always goes on from a complete checkpoint."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megalite.checkpoint import catalog
from megalite.checkpoint.attempt import join_attempt
from megalite.checkpoint.background import Saver
from megalite.checkpoint.format import Progress
from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.retention import Keep, prune
from megalite.checkpoint.saving import Target
from tests.kit.spawn import RanksFailed, run_ranks
from tests.kit.train import start_rank, tiny_config

NUM_KILLS = 20
FIRST_SAVE_SECONDS = 0.05
"""About what a save takes; later ones are killed by what the one before took."""
LAST_MOMENT = 1.2
"""A save that took a second is killed up to here, in seconds: also after its commit, while old ones are removed."""

CONFIG = {
    "parallel": {"dp": 2, "zero_stage": 1},
    "model": {"hidden_size": 256, "ffn_hidden_size": 512},
    "train": {"steps": 1000},
}


def save_until_killed(run_dir: Path, asynchronous: bool, doomed: int, moment: float) -> None:
    """Become the next attempt, go on from the newest checkpoint, save every step, and die by kill -9 in one save.

    Args:
        doomed: how many saves end well before.
        moment: when to die, as a share of the time that a save takes.
    """
    root = run_dir / catalog.CHECKPOINTS
    newest = catalog.latest(root)
    rank = start_rank(tiny_config(**CONFIG), newest)
    fence = join_attempt(run_dir, None, rank.axes, torch.device("cpu"))
    target = Target(root, rank.plan, "", {}, fence)
    saver = Saver(
        target,
        rank.engine,
        rank.axes,
        torch.device("cpu"),
        asynchronous=asynchronous,
        after_commit=lambda new: prune(root, Keep(2), new),
    )
    first, seconds = catalog.step_of(newest) if newest else 0, FIRST_SAVE_SECONDS
    for step in itertools.count(first + 1):
        rank.train(step - 1, step)
        dist.barrier()
        if step == first + 1 + doomed:
            threading.Timer(moment * seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        clock = time.perf_counter()
        saver.start(Progress(step=step, num_updates=step))
        if asynchronous:
            rank.train(step - 1, step)  # the next step, while the thread writes
        saver.finish()
        seconds = time.perf_counter() - clock


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_kill_9_at_twenty_moments_of_a_save(tmp_path, asynchronous):
    """Both ranks die at a random moment of a save, twenty times in a row, each time going on from what was left.

    After every death all folders called step-… are complete, with every checksum right, and nothing that was
    committed is lost.
    """
    root, rng = tmp_path / catalog.CHECKPOINTS, np.random.default_rng(7)
    newest, unfinished = 0, 0
    for number in range(NUM_KILLS):
        doomed, moment = int(rng.integers(0, 3)), float(rng.uniform(0, LAST_MOMENT))
        with pytest.raises(RanksFailed, match="exit code -9"):
            run_ranks(save_until_killed, 2, tmp_path, asynchronous, doomed, moment)
        assert catalog.named(root) == catalog.complete(root), f"kill {number}: half a checkpoint has a name"
        for folder in catalog.complete(root):
            assert CheckpointReader(folder).verify() == [], f"kill {number}"
        latest = catalog.latest(root)
        step = catalog.step_of(latest) if latest else 0
        assert step >= newest, f"kill {number}: step {newest} is lost"
        newest = step
        unfinished += bool(list(root.glob(f"{catalog.PARTIAL}*")))
    assert newest > 0
    assert unfinished > 0, "no kill hit a save: the test shows nothing"
    catalog.sweep(root)
    assert catalog.named(root) == sorted(root.iterdir())
