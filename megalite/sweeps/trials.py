"""Trials: configs made of one config, all of them checked before the first one starts."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megalite.config.load import in_folder
from megalite.config.plan import default_world_size
from megalite.config.schema import Config
from megalite.config.yaml_source import MAX_COMPLAINTS
from megalite.data.run_config import load_run
from megalite.errors import ConfigError, UserError
from megalite.sweeps.space import Point, in_words, overrides_of
from megalite.train.preflight import preflight

CHECKS = ".checks"
"""Stands for the run folder of a trial while it is checked."""


@dataclass(frozen=True)
class Trial:
    """One run of several."""

    name: str
    """Of its folder, too."""
    config: Config
    about: str
    """What sets it apart, in a line."""
    steps: int | None = None
    """To which it trains, where that is not the config's own end."""

    @property
    def folder(self) -> Path:
        """Its run folder."""
        return self.config.run.dir

    @property
    def world_size(self) -> int:
        """Ranks that it takes."""
        return default_world_size(self.config)


def trial_name(number: int) -> str:
    """Of a folder; trials count from 1."""
    return f"trial-{number:04d}"


def make_trial(number: int, point: Point, base: Path, overrides: Sequence[str], folder: Path) -> Trial:
    """A trial of a sweep.

    Raises:
        ConfigError: a key or a value of it is wrong.
    """
    name = trial_name(number)
    own = overrides_of(point)
    config = in_folder(load_run(base, [*overrides, *own]), folder / name)
    return Trial(name, config, in_words(point))


class Complaints:
    """What is wrong with some of many trials, each sentence once."""

    def __init__(self) -> None:
        self._found: dict[str, list[str]] = {}

    def add(self, error: UserError, name: str, about: str, *, where: str = "") -> None:
        """Note what is wrong with a trial.

        Args:
            where: begins each sentence.
        """
        for problem in error.problems if isinstance(error, ConfigError) else (str(error),):
            self._found.setdefault(f"{where}{problem}", []).append(f"{name}, {about}")

    def refuse(self) -> None:
        """End here if there was anything.

        Raises:
            ConfigError: with all of it.
        """
        told = []
        for problem, trials in self._found.items():
            more = f", and {len(trials) - 1} more trials" if len(trials) > 1 else ""
            told.append(f"{problem} ({trials[0]}{more})")
        if len(told) > MAX_COMPLAINTS:
            told[MAX_COMPLAINTS:] = ["and more; correct these first"]
        if told:
            raise ConfigError(told)


@dataclass(frozen=True)
class Checked:
    """Trials, and what is wrong with those that could not be made."""

    trials: tuple[Trial, ...]
    complaints: Complaints


def make_trials(points: Iterable[Point], base: Path, overrides: Sequence[str], folder: Path) -> Checked:
    """Trials of a sweep, those whose keys and values are sound, and what is wrong with the others."""
    made: list[Trial] = []
    complaints = Complaints()
    for number, point in enumerate(points, start=1):
        try:
            made.append(make_trial(number, point, base, overrides, folder))
        except UserError as error:
            complaints.add(error, trial_name(number), in_words(point))
    return Checked(tuple(made), complaints)


def check_trials(
    trials: Sequence[Trial], folder: Path, complaints: Complaints, *, has_device: bool = True, where: str = ""
) -> None:
    """All that can be known to be wrong with each trial before it starts; nothing is left behind.

    Args:
        folder: of the sweep.
        complaints: that there are already.
        has_device: whether this machine will train them.
        where: begins each complaint.

    Raises:
        ConfigError: with each complaint once, and the first trial that has it.
    """
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    stand_in = folder / CHECKS
    try:
        for trial in trials:
            try:
                preflight(in_folder(trial.config, stand_in), trial.world_size, has_device=has_device)
            except UserError as error:
                complaints.add(error, trial.name, trial.about, where=where)
        complaints.refuse()
    finally:
        shutil.rmtree(stand_in, ignore_errors=True)
        made = folder.absolute()
        while made != there.absolute() and made.is_dir() and not any(made.iterdir()):
            made.rmdir()
            made = made.parent
