"""Whether a run stands still, told from heartbeats: a clock that runs on while nothing moves would lie about goodput.

    a rank gives no sign           since its last sign, whatever the others do: they wait for it
    all give signs, none moves     since the last of them moved, once that takes much longer than a step usually does

`train.watch` ends an attempt after `slurm.beat_seconds` or `step_seconds`; this says earlier what is waited for, and
afterwards how long it was. Pure functions of what was read and the time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megalite.train.heartbeat import DONE, PHASES, START, Beat

SILENT_SECONDS = 4.0
"""A heartbeat comes each second."""

SHORTEST_SECONDS, TIMES_USUAL = 4.0, 4.0
"""A step that takes longer than this, and so many times as long as the last one, stands still."""

PHASES_OF_STEPS = ("data", "train")
"""Of which the usual time is known. A validation or a save takes as long as it takes."""

NUM_NAMED = 4


@dataclass(frozen=True)
class Stall:
    """Nothing moves."""

    since: float
    """By the clock of heartbeats."""
    why: str
    """Which ranks are waited for, and where they stand."""


def find_stall(beats: Mapping[int, Beat], now: float) -> Stall | None:
    """What is waited for; None while the run moves, and after its end.

    Args:
        beats: the last beat of each rank that has left one.
        now: by the clock of the beats.
    """
    silent = {rank: beat for rank, beat in beats.items() if now - beat.time > SILENT_SECONDS and beat.phase != DONE}
    if silent:
        first = min(silent.values(), key=lambda beat: beat.time)
        return Stall(first.time, f"{_names(list(silent))}: no heartbeat, last in {_where(first)}")
    at_work = {rank: beat for rank, beat in beats.items() if beat.step != START and beat.phase in PHASES_OF_STEPS}
    if not at_work or len(at_work) < len(beats):
        return None
    moved, usual = max(beat.since for beat in beats.values()), max(beat.step_seconds for beat in beats.values())
    if not usual or now - moved <= max(SHORTEST_SECONDS, TIMES_USUAL * usual):
        return None
    behind = min((beat.step, PHASES.index(beat.phase)) for beat in beats.values())
    ranks = [rank for rank, beat in beats.items() if (beat.step, PHASES.index(beat.phase)) == behind]
    who = "all ranks" if len(ranks) == len(beats) else _names(ranks)
    return Stall(moved, f"{who}: in {_where(beats[ranks[0]])}")


def last_move(beats: Mapping[int, Beat]) -> float | None:
    """When a rank last went from one phase to the next; None where no rank has left a sign."""
    return max((beat.since for beat in beats.values()), default=None)


def _names(ranks: list[int]) -> str:
    named = ", ".join(f"rank {rank}" for rank in sorted(ranks)[:NUM_NAMED])
    return named + (f" and {len(ranks) - NUM_NAMED} more" if len(ranks) > NUM_NAMED else "")


def _where(beat: Beat) -> str:
    return "the start" if beat.step == START else f"step {beat.step}, {beat.phase}"


class StallTracker:
    """Notes when stalls of an attempt begin and end."""

    def __init__(self) -> None:
        self._present: Stall | None = None
        self._counted_until = 0.0

    def update(self, beats: Mapping[int, Beat], now: float) -> tuple[Stall | None, dict[str, object] | None]:
        """Take in the newest heartbeats.

        Returns:
            One that has begun since the last call, and what to write down of one that has ended.
        """
        found, before = find_stall(beats, now), self._present
        if (found is None) == (before is None):  # as before; what it is called may change while it lasts
            return None, None
        self._present = found
        if before is None:
            return found, None
        since = max(before.since, self._counted_until)
        self._counted_until = now
        return None, {"since": round(since, 3), "seconds": round(now - since, 3), "why": before.why}
