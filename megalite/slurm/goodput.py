"""Where the time of a run went: computing, starting, saving, standing still, lost to failures, waiting for nodes.

    attempt     |-- starting --|-- computing ---------- save -- computing --|... still ...|x
                                                             |--- lost ---|     the last checkpoint is at `save`

Time counts as computing while heartbeats move on, and no longer: from the last move to the end of an attempt, or to
now, nothing was computed, whatever a supervisor says that may be dead itself. From files that a run leaves anyway: the
supervisor's events, the run's events, and the last heartbeat of each rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megalite.report.json_lines import Event, current_kind, read_events
from megalite.slurm.folder import ENDED, LaunchFolder
from megalite.slurm.stall import find_stall, last_move
from megalite.train.heartbeat import Beat, read_beats
from megalite.train.run_folder import EVENTS

LAUNCHED = "launched"
BORDERS = (LAUNCHED, *map(current_kind, ENDED))
"""Of the time that counts; a stale supervisor may write down more after an end."""


@dataclass(frozen=True)
class AttemptTime:
    """Seconds of one attempt."""

    attempt: int
    job: str
    num_nodes: int
    total: float
    starting: float
    saving: float
    """In which the loop stood still for a save."""
    validating: float
    stalled: float
    """In which no rank moved on."""
    lost: float
    """Steps that a later attempt did again."""
    first_step: int
    last_step: int
    why: str
    """How it ended; empty while it runs."""

    def parts(self) -> dict[str, float]:
        """Its seconds, by what they went into."""
        names = ("computing", "starting", "validating", "saving", "stalled", "lost")
        return {"standing still" if name == "stalled" else name: getattr(self, name) for name in names}

    @property
    def computing(self) -> float:
        """On steps that count."""
        idle = self.starting + self.saving + self.validating + self.stalled
        return max(0.0, self.total - idle - self.lost)


@dataclass(frozen=True)
class Goodput:
    """Seconds of a run since it was launched."""

    attempts: tuple[AttemptTime, ...]
    total: float

    @property
    def waiting(self) -> float:
        """Without an attempt: in the queue, checking nodes, between two jobs."""
        return max(0.0, self.total - sum(attempt.total for attempt in self.attempts))

    @property
    def share(self) -> float:
        """Of all time, that spent on steps that count."""
        return sum(attempt.computing for attempt in self.attempts) / self.total if self.total else 0.0


def measure(folder: LaunchFolder, now: float) -> Goodput:
    """Account for a run's time.

    Args:
        folder: of the run.
        now: for an attempt that still runs.
    """
    own, run = folder.read_events(), read_events(folder.run_dir / EVENTS)
    launched: float = next((event["time"] for event in own if event["event"] == LAUNCHED), now)
    begun = [event for event in own if event["event"] == "attempt"]
    ends = {event["attempt"]: event for event in own if event["event"] == "end"}
    starts = {event.get("attempt"): event for event in run if event["event"] == "start"}
    attempts = []
    for place, begin in enumerate(begun):
        number, later = begin["attempt"], (starts.get(each["attempt"]) for each in begun[place + 1 :])
        resumed = next((start["step"] for start in later if start is not None), None)
        jobs = (event["time"] for event in own if event["time"] > begin["time"] and event["event"] == "job")
        following = next(jobs, now)
        end = ends.get(number)
        if end is None and following < now:
            end = {"time": following, "why": "its supervisor ended first"}
        elif end is not None and end["time"] > following:  # a stale one, that went on beside its successor
            end = {**end, "time": following}
        stalls = [each for each in own if each["event"] == "standstill" and each["attempt"] == number]
        movement = _Movement(read_beats(folder.attempt(number) / "beats"), stalls)
        attempts.append(_attempt_time(begin, end, starts.get(number), resumed, run, movement, now))
    last = next((event for event in reversed(own) if event["event"] in BORDERS), None)
    until = last["time"] if last is not None and last["event"] != LAUNCHED else now
    return Goodput(tuple(attempts), until - launched)


@dataclass(frozen=True)
class _Movement:
    """What is known of when an attempt's ranks moved on."""

    beats: Mapping[int, Beat]
    stalls: Sequence[Event]
    """Stalls that came to an end."""

    def stalled_seconds(self, begin: float, stop: float, *, is_over: bool) -> float:
        """Seconds between two times in which nothing moved."""
        seconds = 0.0
        for each in self.stalls:
            seconds += max(0.0, min(stop, each["since"] + each["seconds"]) - max(begin, each["since"]))
        if is_over:
            moved = last_move(self.beats)
            return seconds + max(0.0, stop - max(moved, begin)) if moved is not None else seconds
        now = find_stall(self.beats, stop)
        return seconds + (max(0.0, stop - max(now.since, begin)) if now is not None else 0.0)


def _attempt_time(
    begin: Event,
    end: Event | None,
    start: Event | None,
    resumed: int | None,
    run: Sequence[Event],
    movement: _Movement,
    now: float,
) -> AttemptTime:
    """The seconds of an attempt; `resumed` is the step from which the next one went on."""
    stop = end["time"] if end else now
    working = start["time"] if start and start["time"] <= stop else stop
    inside = [event for event in run if working <= event["time"] <= stop]
    saves = (event for event in inside if event["event"] == "save")
    saving: float = sum(
        each["stalled_seconds"] if "stalled_seconds" in each else each.get("seconds", 0.0) for each in saves
    )
    validations = (event for event in inside if event["event"] == "validation")
    validating: float = sum(event.get("seconds", 0.0) for event in validations)
    stalled = movement.stalled_seconds(working, stop, is_over=end is not None)
    first = start["step"] if start else 0
    last = max([first, *(event["step"] for event in inside)])
    last = max(last, end.get("last_step", 0)) if end else last
    steps_lost = max(0, last - resumed) if resumed is not None else 0
    at_work = max(0.0, stop - working - saving - validating - stalled)
    return AttemptTime(
        attempt=begin["attempt"],
        job=begin["job"],
        num_nodes=len(begin["nodes"]),
        total=stop - begin["time"],
        starting=working - begin["time"],
        saving=saving,
        validating=validating,
        stalled=stalled,
        lost=at_work * steps_lost / (last - first) if last > first else 0.0,
        first_step=first,
        last_step=last,
        why=end["why"] if end else "",
    )
