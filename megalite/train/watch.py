"""Which rank holds a run up: told from heartbeats, in seconds, before any collective times out.

Every rank has a thread that leaves a beat each second: the step it is in, what it does there, and since when.

    no beat for a while               the process or its node is frozen, stopped or gone
    beats, but no rank moves on       all wait for the ranks that are farthest behind: those are named
    a product takes long (`probe.py`) the rank's device is slow, and with it every step of all

Pure functions of what was read and the time, so that tests need no clock.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from megalite.train.heartbeat import PHASES, START, Beat

SLOWEST_PRODUCT = 1.5
"""Times the median rank's, from which on a rank counts as slow. Devices of a kind differ by some hundredths; a GPU that
is throttled loses a third or more."""


@dataclass(frozen=True)
class Patience:
    """How long is too long, in seconds."""

    beat: float
    """Without a beat."""
    start: float
    """From the start to the first step: imports, compilation, reading a checkpoint over a slow disk."""
    step: float
    """Within one phase of a step, everywhere."""


@dataclass(frozen=True)
class Trouble:
    """Ranks that hold the run up."""

    ranks: tuple[int, ...]
    why: str


def find_trouble(
    beats: Mapping[int, Beat], world_size: int, *, started: float, now: float, patience: Patience
) -> Trouble | None:
    """The ranks to blame when a run does not go on; None while all is well.

    Args:
        beats: the last beat of each rank that has left one.
        started: when the attempt began.
        now: by the clock of the beats.
    """
    silent = [rank for rank in range(world_size) if rank not in beats]
    if silent and now - started > patience.start:
        return Trouble(tuple(silent), f"no sign of life in the {now - started:.0f} s since the start")
    frozen = sorted(rank for rank, beat in beats.items() if now - beat.time > patience.beat)
    if frozen:
        oldest = max(now - beats[rank].time for rank in frozen)
        return Trouble(tuple(frozen), f"no heartbeat for {oldest:.0f} s, last in {_where(beats[frozen[0]])}")
    if silent or not beats:
        return None
    latest = max(beat.since for beat in beats.values())
    limit = patience.start if any(beat.step == START for beat in beats.values()) else patience.step
    if now - latest <= limit:
        return None
    last = min(_progress(beat) for beat in beats.values())
    behind = tuple(sorted(rank for rank, beat in beats.items() if _progress(beat) == last))
    everywhere = " (all ranks)" if len(behind) == world_size else ""
    return Trouble(behind, f"no progress for {now - latest:.0f} s: {_where(beats[behind[0]])}{everywhere}")


def find_stragglers(beats: Mapping[int, Beat]) -> dict[int, str]:
    """Ranks whose device is slow, with figures; those that have not measured yet are left out."""
    seconds = {rank: beat.product_seconds for rank, beat in beats.items() if beat.product_seconds}
    if len(seconds) < 2:
        return {}
    usual = statistics.median_low(seconds.values())
    return {
        rank: f"{1e3 * taken:.1f} ms for a product that takes the median rank {1e3 * usual:.1f} ms"
        for rank, taken in sorted(seconds.items())
        if taken > SLOWEST_PRODUCT * usual
    }


def _progress(beat: Beat) -> tuple[int, int]:
    """Larger for ranks that are farther: in a later step, or in a later phase of the same one."""
    return beat.step, PHASES.index(beat.phase)


def _where(beat: Beat) -> str:
    return "the start" if beat.step == START else f"step {beat.step}, {beat.phase}"
