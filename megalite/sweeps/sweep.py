"""A sweep from its first check to its last trial.

    file or options -> points -> trials, all checked -> trained, on this machine or on Slurm -> sweep.json, sweep.html

Killed at any moment it goes on when the same command is given again: finished trials stay as they are, one in the
middle goes on from its checkpoint.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from megalite.config.load import load_config
from megalite.errors import UserError
from megalite.stations.lease import Lease
from megalite.sweeps.halving import at_rung, num_promoted, rungs
from megalite.sweeps.outcome import TrialOutcome, check_metric
from megalite.sweeps.record import ENDED, Rung, SweepBook, TrialRecord
from megalite.sweeps.settings import SweepConfig
from megalite.sweeps.space import Point, corners, grid, in_words
from megalite.sweeps.suggest import Suggestions
from megalite.sweeps.trials import Trial, check_trials, make_trial, make_trials

POLL_SECONDS = 0.1

LOCK = ".lock"
"""In a sweep's folder: who is at work there."""


IN_FIRST_RUNG = "halving: its first rung would be a run of {:,} steps, which is refused (use a larger min_steps): "


class TrialRunner(Protocol):
    """Where trials run."""

    @property
    def has_room(self) -> bool: ...

    @property
    def is_idle(self) -> bool: ...

    def start(self, trial: Trial) -> None: ...

    def ended(self) -> list[tuple[Trial, TrialOutcome]]: ...

    def stop(self, *, at_once: bool) -> None: ...


Told = Callable[[str], None]
"""Takes a line about what happened."""


@dataclass(frozen=True)
class Prepared:
    """A sweep whose every part has been checked."""

    settings: SweepConfig
    trials: tuple[Trial, ...]
    """All of them; with TPE those that show that the space is sound."""
    rungs: tuple[int, ...]
    """Steps of each; empty without halving."""


def prepare(settings: SweepConfig, *, has_device: bool = True) -> Prepared:
    """Make every trial and check it.

    Raises:
        UserError: with every complaint about every trial.
    """
    points = corners(settings.dimensions()) if settings.method == "tpe" else all_points(settings)
    suggestions_or_refuse(settings)
    made = make_trials(points, settings.config, settings.overrides, settings.dir)
    trials, complaints = made.trials, made.complaints
    check_trials(trials, settings.dir, complaints, has_device=has_device)
    check_metric(trials[0].config, settings.metric)
    steps = rungs(trials, settings.halving) if settings.halving is not None else ()
    if steps:
        firsts = [at_rung(each, steps[0]) for each in trials]
        check_trials(firsts, settings.dir, complaints, has_device=has_device, where=IN_FIRST_RUNG.format(steps[0]))
    return Prepared(settings, trials, steps)


def all_points(settings: SweepConfig) -> list[Point]:
    """Of a grid, or drawn at random: known before anything has run."""
    if settings.method == "grid":
        return grid(settings.dimensions())
    suggestions = suggestions_or_refuse(settings)
    assert suggestions is not None, "not a grid"
    return [suggestions.draw(number, ()) for number in range(1, (settings.trials or 0) + 1)]


def suggestions_or_refuse(settings: SweepConfig) -> Suggestions | None:
    """What draws points; None for a grid.

    Raises:
        UnavailableError: Optuna is not installed.
    """
    if settings.method == "grid":
        return None
    return Suggestions(settings.dimensions(), settings.method, settings.seed, settings.goal)


class SweepRun:
    """A sweep at work.

    Args:
        prepared: what to do.
        runner: where.
        told: takes a line for each trial that ends.
        retry_failed: whether trials that have failed before are tried again.
        may_grow: whether the space may have more values than when the sweep began, behind those that it had.
    """

    def __init__(
        self, prepared: Prepared, runner: TrialRunner, told: Told, *, retry_failed: bool = False, may_grow: bool = False
    ):
        self._prepared, self._settings = prepared, prepared.settings
        self._runner, self._told, self._retry, self._may_grow = runner, told, retry_failed, may_grow
        self._requests: list[int] = []
        self._is_unfinished = False

    def run(self) -> SweepBook:
        """Train what is left to train.

        Raises:
            UserError: the folder holds another sweep, or another process is at work in it.
        """
        folder = self._settings.dir
        folder.mkdir(parents=True, exist_ok=True)
        with Lease(folder / LOCK, folder), self._listening():
            book = open_book(self._settings, may_grow=self._may_grow)
            if self._retry:
                again = [each for each in book.trials.values() if each.state == "failed"]
                book.trials |= {
                    each.number: TrialRecord(number=each.number, point=each.point, rungs=each.rungs) for each in again
                }
            if self._settings.method == "tpe":
                self._adaptively(book)
            elif self._prepared.rungs:
                self._by_rungs(book)
            else:
                self._plainly(book)
            self._is_unfinished = not all(each.has_ended for each in book.trials.values())
        return book

    @property
    def was_stopped(self) -> bool:
        """Whether somebody asked it to stop, or a trial."""
        return bool(self._requests) or self._is_unfinished

    def _plainly(self, book: SweepBook) -> None:
        numbered = list(enumerate(self._prepared.trials, start=1))
        points = all_points(self._settings)
        for number, _ in numbered:
            book.add(number, points[number - 1])
        book.save()
        left = iter([(number, trial) for number, trial in numbered if not book.trials[number].has_ended])
        self._drive(lambda: next(left, None), lambda number, outcome: self._note(book, number, outcome))

    def _adaptively(self, book: SweepBook) -> None:
        """Ask for a trial whenever there is room for one: it goes by all that has ended by then."""
        settings, suggestions = self._settings, suggestions_or_refuse(self._settings)
        assert suggestions is not None, "tpe draws"
        started: set[int] = set()

        def following() -> tuple[int, Trial] | None:
            waiting = [each for each in book.trials.values() if not each.has_ended and each.number not in started]
            if waiting:
                number, point = waiting[0].number, waiting[0].point
            elif len(book.trials) < (settings.trials or 0):
                number = len(book.trials) + 1
                point = suggestions.draw(number, [(each.point, each.value) for each in book.trials.values()])
                book.put(TrialRecord(number=number, point=point))
            else:
                return None
            started.add(number)
            try:
                return number, make_trial(number, point, settings.config, settings.overrides, settings.dir)
            except UserError as error:
                self._note(book, number, TrialOutcome("failed", why=str(error)))
                return following()

        self._drive(following, lambda number, outcome: self._note(book, number, outcome))

    def _by_rungs(self, book: SweepBook) -> None:
        points, trials = all_points(self._settings), self._prepared.trials
        for number in range(1, len(trials) + 1):
            book.add(number, points[number - 1])
        book.save()
        alive = list(book.trials)
        assert self._settings.halving is not None, "there are rungs"
        for steps in self._prepared.rungs:
            is_last = steps == self._prepared.rungs[-1]
            self._rung(book, alive, steps, is_last=is_last)
            if self._requests or is_last:
                return
            values = {number: _value_at(book.trials[number], steps) for number in alive}
            if unfinished := [n for n in alive if values[n] is None and not book.trials[n].has_ended]:
                words = ", ".join(map(str, unfinished))
                self._told(f"not yet at step {steps:,}: trial {words}; run the sweep again to go on with it")
                return
            ranked = sorted(
                (number for number in alive if values[number] is not None), key=lambda each: self._rank(values[each])
            )
            kept = ranked[: num_promoted(len(alive), self._settings.halving.factor)]
            for number in alive:
                state = book.trials[number].state
                if number in kept and state == "pruned":  # when there were fewer trials
                    book.put(book.trials[number].model_copy(update={"state": "waiting"}))
                elif number not in kept and state not in ENDED:
                    book.put(book.trials[number].model_copy(update={"state": "pruned"}))
            self._told(f"{len(kept)} of {len(alive)} go on from step {steps:,}")
            alive = sorted(kept)

    def _rank(self, value: float | None) -> float:
        assert value is not None, "only trials with one are ranked"
        return value if self._settings.goal == "min" else -value

    def _rung(self, book: SweepBook, alive: Sequence[int], steps: int, *, is_last: bool) -> None:
        def is_left(number: int) -> bool:
            record = book.trials[number]
            return not record.has_ended and all(rung.steps != steps for rung in record.rungs)

        left = iter(
            [(number, at_rung(self._prepared.trials[number - 1], steps)) for number in alive if is_left(number)]
        )

        def note(number: int, outcome: TrialOutcome) -> None:
            record = book.trials[number]
            if outcome.state == "done":
                rungs_now = (*record.rungs, Rung(steps=steps, value=outcome.value))
                state = "done" if is_last else "waiting"
                book.trials[number] = record.model_copy(update={"rungs": rungs_now})
                self._note(book, number, outcome, state=state)
            else:
                self._note(book, number, outcome)

        self._drive(lambda: next(left, None), note)

    def _note(self, book: SweepBook, number: int, outcome: TrialOutcome, state: str | None = None) -> None:
        record = book.trials[number].with_outcome(outcome)
        book.put(record if state is None else record.model_copy(update={"state": state}))
        self._told(line_of(record, outcome, self._settings.metric))

    def _drive(
        self, following: Callable[[], tuple[int, Trial] | None], note: Callable[[int, TrialOutcome], None]
    ) -> None:
        """Keep the runner busy until there is nothing left, or somebody asks to stop."""
        runner, numbers, is_over = self._runner, dict[str, int](), False
        while True:
            while runner.has_room and not is_over and not self._requests:
                asked = following()
                if asked is None:
                    is_over = True
                    break
                numbers[asked[1].name] = asked[0]
                runner.start(asked[1])
                if self._requests:  # it came while the trial was being started
                    runner.stop(at_once=False)
            for trial, outcome in runner.ended():
                note(numbers[trial.name], outcome)
            if runner.is_idle and (is_over or self._requests):
                return
            time.sleep(POLL_SECONDS)

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Within it the first request to stop is passed on, and the second SIGINT ends all at once."""

        def hear(number: int, frame: Any) -> None:
            self._requests.append(number)
            at_once = self._requests.count(signal.SIGINT) > 1
            if len(self._requests) == 1:
                self._told("stopping: trials save and end; press Ctrl-C again to end at once")
            self._runner.stop(at_once=at_once)

        before = {number: signal.signal(number, hear) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def open_book(settings: SweepConfig, *, may_grow: bool = False) -> SweepBook:
    """The record of a sweep, new or begun.

    Args:
        may_grow: whether its space may have got more values.

    Raises:
        ConfigError: the folder holds another sweep.
    """
    base = load_config(settings.config, settings.overrides).model_dump(mode="json")
    plain = settings.model_dump(mode="json", exclude={"dir", "config", "overrides"})
    return SweepBook(settings.dir, plain, base, may_grow=may_grow)


def line_of(record: TrialRecord, outcome: TrialOutcome, metric: str) -> str:
    """A trial that has ended, in a line."""
    said = f"{metric} {outcome.value:.4f}" if outcome.value is not None else f"{outcome.state}: {outcome.why}"
    return f"trial {record.number}, {in_words(record.point)}: step {outcome.steps:,}, {said}"


def _value_at(record: TrialRecord, steps: int) -> float | None:
    return next((rung.value for rung in record.rungs if rung.steps == steps), None)
