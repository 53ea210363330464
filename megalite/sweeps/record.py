"""sweep.json: what a sweep was asked, and how each of its trials stands. Written whole at every change."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveInt

from megalite.errors import ConfigError, DataError
from megalite.files import write_atomically
from megalite.page.markup import flatten
from megalite.records import Record, read_record
from megalite.sweeps.outcome import TrialOutcome
from megalite.sweeps.space import Point

FILE = "sweep.json"

MAY_CHANGE = ("trials",)
"""Settings of a sweep that may be others when it goes on; `trials` may only grow."""

NOT_COMPARED = ("run.dir",)

TrialState = Literal["waiting", "done", "diverged", "failed", "stopped", "pruned"]
"""pruned: successive halving has ended it."""

ENDED = ("done", "diverged", "failed", "pruned")


class Rung(Record):
    """What a trial had come to when successive halving looked."""

    steps: PositiveInt
    value: float | None


class TrialRecord(Record):
    """A trial."""

    number: PositiveInt
    point: dict[str, Any]
    state: TrialState = "waiting"
    value: float | None = None
    steps: NonNegativeInt = 0
    seconds: float = 0.0
    tokens: NonNegativeInt = 0
    why: str = ""
    rungs: tuple[Rung, ...] = ()

    def with_outcome(self, outcome: TrialOutcome) -> TrialRecord:
        """The same after it has run."""
        return self.model_copy(update=vars(outcome))

    @property
    def has_ended(self) -> bool:
        """Nothing more is to be done for it."""
        return self.state in ENDED


class SweepRecord(Record):
    """The file."""

    format: Literal[1]
    settings: dict[str, Any]
    """Of the sweep."""
    base: dict[str, Any]
    """The config that every trial starts from, filled in."""
    trials: tuple[TrialRecord, ...]


class SweepBook:
    """The trials of a sweep, kept in its folder.

    Args:
        folder: of the sweep.
        settings: of the sweep.
        base: the config that trials start from.
        may_grow: whether the space may be another; its points are compared by `add`.

    Raises:
        ConfigError: the folder holds another sweep; every setting that differs is named.
        DataError: its file is damaged.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], base: dict[str, Any], *, may_grow: bool = False):
        self._path, self._settings, self._base = folder / FILE, settings, base
        self.trials: dict[int, TrialRecord] = {}
        try:
            former = read_record(self._path, SweepRecord, "remove it to start the sweep anew")
        except FileNotFoundError:
            return
        before, after = (
            {key: value for key, value in each.items() if not (may_grow and key == "space")}
            for each in (former.settings, settings)
        )
        changed = [*_changed("", before, after), *_changed("config: ", former.base, base)]
        if changed:
            advice = f"{folder} holds another sweep; take these back, or give the sweep a folder of its own (dir)"
            raise ConfigError([*changed, advice])
        wanted, had = settings.get("trials"), len(former.trials)
        if wanted is not None and wanted < had:
            raise ConfigError([f"trials: {wanted}, but {folder} has {had} already; give that many, or more"])
        self.trials = {each.number: each for each in former.trials}

    def add(self, number: int, point: Point) -> None:
        """A trial that is not there yet; one that is must have the same point.

        Raises:
            DataError: it has another one.
        """
        known = self.trials.setdefault(number, TrialRecord(number=number, point=point))
        if json.dumps(known.point) != json.dumps(point):
            raise DataError(
                f"{self._path}: trial {number} is {known.point}, and would be {point} now; go on with the sizes, or "
                "with the version of Optuna, that it began with, or give it a folder of its own"
            )

    def put(self, record: TrialRecord) -> None:
        """Change a trial, and write the file."""
        self.trials[record.number] = record
        self.save()

    def save(self) -> None:
        """Write the file."""
        trials = tuple(self.trials[number] for number in sorted(self.trials))
        record = SweepRecord(format=1, settings=self._settings, base=self._base, trials=trials)
        write_atomically(self._path, record.model_dump_json(indent=1) + "\n")


def _changed(prefix: str, former: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    before, after = flatten(former), flatten(now)
    for key in sorted(before.keys() | after.keys()):
        if key not in (*MAY_CHANGE, *NOT_COMPARED) and before.get(key) != after.get(key):
            yield f"{prefix}{key}: {before.get(key)!r} before, {after.get(key)!r} now"
