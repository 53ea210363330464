"""Weights & Biases, for those who watch their runs there; `pip install 'megalite[wandb]'`. Works without a network."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from megalite.config.sections.monitor import WandbConfig
from megalite.errors import UnavailableError


def check_wandb() -> None:
    """Refuse to start without the package.

    Raises:
        UnavailableError: it is not installed.
    """
    if importlib.util.find_spec("wandb") is None:
        raise UnavailableError(
            "monitor.wandb: the package is not installed; pip install 'megalite[wandb]', or set it to null"
        )


class WandbBoard:
    """Sends scalars to a run on Weights & Biases. One rank only.

    Its own steps never go back, so ours is a number of its own, which every curve is drawn over: a rollback draws anew.
    """

    def __init__(self, settings: WandbConfig, folder: Path, config: dict):
        import wandb

        self._run = wandb.init(
            project=settings.project,
            name=settings.name or folder.name,
            id=settings.id,
            resume="allow" if settings.id else None,
            mode=settings.mode,
            dir=str(folder),
            config=config,
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def add(self, step: int, scalars: dict[str, float]) -> None:
        """Write scalars of a step."""
        self._run.log({"step": step, **scalars})

    def rewind(self, step: int) -> None:
        """Nothing: what is done again is drawn over."""

    def close(self) -> None:
        self._run.finish()
