"""What a launched run waits for, and since when: for `megalite launch status`.

Asked from the outside in: is there a job? does its supervisor live? what does it say? do the ranks move? So that a run
whose supervisor is dead is not said to run because its last words were "running".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megalite.slurm.controller import QueuedJob
from megalite.slurm.stall import find_stall
from megalite.train.heartbeat import START, Beat

LONGEST_SILENCE_SECONDS = 10.0
"""Of a supervisor, of which a thread gives a sign each second."""

NOT_AT_WORK = ("PENDING", "CONFIGURING", "COMPLETING")
"""States of jobs that have not begun, or that Slurm cleans up after."""

NUM_NAMED = 4


@dataclass(frozen=True)
class WaitReason:
    """What is waited for."""

    what: str
    since: float | None
    """None where it cannot be told."""


def find_wait_reason(
    state: Mapping[str, Any],
    said: Mapping[str, Any] | None,
    jobs: Sequence[QueuedJob] | None,
    beats: Mapping[int, Beat],
    *,
    world_size: int,
    alive: float | None,
    attempt_began: float | None,
    now: float,
) -> WaitReason | None:
    """What a run waits for that has not ended; None while it computes.

    Args:
        state: as the supervisor wrote it last.
        said: by the supervisor, of what it waits for.
        jobs: of the run, that wait or run, oldest first; None where Slurm cannot be asked.
        beats: of the last attempt.
        world_size: number of ranks.
        alive: when a supervisor gave its last sign of life; None before the first.
        attempt_began: when the last attempt did; None before the first.
        now: by the clock of beats.
    """
    if jobs is not None and not jobs:
        return WaitReason("someone to launch it again: it has not ended, and no job of it is in the queue", alive)
    if jobs and all(job.state in NOT_AT_WORK for job in jobs):
        job = next((job for job in jobs if job.state == "PENDING"), jobs[0])
        return WaitReason(f"nodes for job {job.number} ({job.reason})", state.get("time"))
    if alive is not None and now - alive > LONGEST_SILENCE_SECONDS:
        return WaitReason(f"a sign of life of the supervisor, job {state.get('job')}", alive)
    if said:
        return WaitReason(said["for"], said["since"])
    if attempt_began is None:
        return WaitReason(f"job {state.get('job')} to begin", state.get("time"))
    if state.get("status") != "running":  # between two jobs
        return WaitReason("the next job to begin", state.get("time"))
    missing = [rank for rank in range(world_size) if rank not in beats]
    if missing:
        return WaitReason(f"{_ranks(missing)} to start", attempt_began)
    still = find_stall(beats, now)
    if still is not None:
        return WaitReason(still.why, still.since)
    starting = [rank for rank, beat in sorted(beats.items()) if beat.step == START]
    if starting:
        return WaitReason(f"{_ranks(starting)} to import, connect and load", attempt_began)
    return None


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) <= NUM_NAMED:
        return ", ".join(f"rank {rank}" for rank in ranks)
    return f"rank {ranks[0]}, rank {ranks[1]} and {len(ranks) - 2} more"
