"""Where scalars are shown besides metrics.jsonl: TensorBoard, and Weights & Biases when asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from megalite.config.schema import Config


class Board(Protocol):
    """Shows curves."""

    def add(self, step: int, scalars: dict[str, float]) -> None:
        """Write scalars of a step."""

    def rewind(self, step: int) -> None:
        """Later steps will be done again."""

    def close(self) -> None:
        """Write what is left."""


def open_boards(config: Config, first_step: int) -> Iterator[Board]:
    """The boards that a config asks for."""
    if config.monitor.tensorboard:
        yield TensorBoard(config.run.dir / "tensorboard", first_step)
    if config.monitor.wandb is not None:
        from megalite.monitor.wandb import WandbBoard

        yield WandbBoard(config.monitor.wandb, config.run.dir, config.model_dump(mode="json"))


class TensorBoard:
    """Event files in a folder. What they hold of steps after `first_step` is no longer shown."""

    def __init__(self, folder: Path, first_step: int):
        self._folder = folder
        self._open(first_step)

    def add(self, step: int, scalars: dict[str, float]) -> None:
        """Write scalars of a step."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def rewind(self, step: int) -> None:
        """Later steps will be done again: they are no longer shown."""
        self.close()
        self._open(step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()

    def _open(self, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder), purge_step=first_step + 1)
