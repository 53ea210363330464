"""The config of a run in another folder, so that a study leaves the run's own alone. No torch."""

from __future__ import annotations

from pathlib import Path

from megalite.checkpoint.catalog import latest, step_of
from megalite.config.length import derive_steps
from megalite.config.load import in_folder
from megalite.config.schema import Config


def aside(config: Config, folder: Path) -> Config:
    """The same run in another folder, on from its newest checkpoint as a branch; anew where it has done its steps."""
    newest = latest(config.run.dir)
    train = config.train
    if newest is not None and not is_finished(config):
        train = train.model_copy(update={"branch_from": newest.absolute(), "init_from": None})
    monitor = config.monitor.model_copy(update={"tensorboard": False})
    return in_folder(config.model_copy(update={"train": train, "monitor": monitor}), folder)


def is_finished(config: Config) -> bool:
    """Whether the run has done its steps."""
    newest = latest(config.run.dir)
    return newest is not None and step_of(newest) >= derive_steps(config)
