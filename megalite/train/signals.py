"""Stop requests: SIGTERM and SIGINT ask for a clean end, which all ranks take at the same step.

Torch is imported only when ranks talk, so that a rank can listen before its imports are done.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from megalite.parallel.axes import Axis

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""SIGUSR1 is how Slurm warns of the end of a job's time (`sbatch --signal=USR1@60`)."""


class StopRequest:
    """Remembers that a signal asked for the end. Installed in each rank before anything else."""

    def __init__(self) -> None:
        self.signal_name = ""

    def install(self) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, self._remember)

    def agreed(self, world: Axis, device: torch.device) -> bool:
        """Whether any rank was asked to stop. Collective."""
        from megalite.parallel.collectives import any_rank

        return any_rank(bool(self.signal_name), world, device)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.signal_name = signal.Signals(number).name
