"""A rank that a node's agent started: `python -m megalite.slurm.rank RUN`.

It takes its place from the agent, leaves heartbeats, and writes the stacks of its threads when it gets SIGUSR2.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
from pathlib import Path

from megalite.slurm.folder import LaunchFolder
from megalite.train.heartbeat import Heartbeat, beat_path
from megalite.train.place import given_place
from megalite.train.worker import leave, run_by, run_rank


def main() -> None:
    """Train as this rank and exit with its code."""
    place = given_place()
    assert place is not None, "a rank is started by an agent"
    assert place.attempt is not None, "and knows its attempt"
    folder = LaunchFolder(Path(sys.argv[1]))
    attempt = folder.attempt(place.attempt)
    with open(stacks_path(attempt, place.rank), "w", encoding="utf-8") as stacks:
        faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
        heartbeat = Heartbeat(beat_path(attempt / "beats", place.rank))
        code = run_by(folder.config, place, lambda config: run_rank(config, place, heartbeat=heartbeat))
        heartbeat.stop()
    leave(code)


def stacks_path(attempt: Path, rank: int) -> Path:
    """Where a rank writes its stacks."""
    return attempt / f"stacks-{rank:05d}.txt"


if __name__ == "__main__":
    main()
