"""A rank that a supervisor started: `python -m megalite.slurm.rank RUN`, one srun task each.

It takes its place from Slurm, leaves heartbeats, and writes the stacks of its threads when it gets SIGUSR2.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from pathlib import Path

from megalite.config.load import load_config
from megalite.slurm.folder import LaunchFolder
from megalite.slurm.network import choose_interface
from megalite.train.heartbeat import Heart, beat_path
from megalite.train.worker import given_place, leave, run_rank


def main() -> None:
    """Train as this rank and exit with its code."""
    place = given_place()
    assert place is not None, "a rank is started by a supervisor"
    assert place.attempt is not None, "and knows its attempt"
    folder = LaunchFolder(Path(sys.argv[1]))
    attempt = folder.attempt(place.attempt)
    with open(stacks_path(attempt, place.rank), "w", encoding="utf-8") as stacks:
        faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
        heart = Heart(beat_path(attempt / "beats", place.rank))
        os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank()))
        choose_interface(os.environ["MASTER_ADDR"])
        code = run_rank(load_config(folder.config), place, heart=heart)
        heart.stop()
    leave(code)


def threads_per_rank() -> int:
    """This rank's share of the cores that it may use: of all of the node's, or of its own where Slurm binds tasks."""
    cores = len(os.sched_getaffinity(0))
    if "SLURM_CPUS_PER_TASK" in os.environ:
        return max(1, min(cores, int(os.environ["SLURM_CPUS_PER_TASK"])))
    return max(1, cores // int(os.environ["SLURM_TASKS_PER_NODE"].partition("(")[0]))


def stacks_path(attempt: Path, rank: int) -> Path:
    """Where a rank writes its stacks."""
    return attempt / f"stacks-{rank:05d}.txt"


if __name__ == "__main__":
    main()
