"""The config of a run in another folder, so that a study leaves the run's own alone. No torch."""

from __future__ import annotations

from pathlib import Path

from megalite.checkpoint.catalog import latest, step_of
from megalite.config.length import derive_steps
from megalite.config.schema import Config


def aside(config: Config, folder: Path) -> Config:
    """The same run in another folder, on from its newest checkpoint as a branch; anew where it has done its steps."""
    newest = latest(config.run.dir)
    train = config.train
    if newest is not None and not is_finished(config):
        train = train.model_copy(update={"branch_from": newest.absolute(), "init_from": None})
    run = config.run.model_copy(update={"dir": folder})
    monitor = config.monitor.model_copy(update={"tensorboard": False})
    return config.model_copy(update={"run": run, "train": train, "monitor": monitor})


def is_finished(config: Config) -> bool:
    """Whether the run has done its steps."""
    newest = latest(config.run.dir)
    return newest is not None and step_of(newest) >= derive_steps(config)
