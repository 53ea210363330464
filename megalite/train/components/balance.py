"""Which data-parallel rank takes how many micro-batches: as told, or as fast as ranks were before this attempt.

    while training    each rank times a product of its own now and then, which waits for no one
    before a save     ranks tell each other; the slowest of a dp rank counts
    at a restart      `deal_out` by the checkpoint's seconds

Within an attempt nothing changes, so its steps are functions of config, data and checkpoint as ever.
"""

from __future__ import annotations

from typing import Any

import torch

from megalite.config.batch_sizes import BatchSizes
from megalite.config.schema import Config
from megalite.config.shares import deal_out
from megalite.engine.protocol import StepResult
from megalite.monitor.recorder import Recorder
from megalite.parallel.axes import Axes
from megalite.parallel.collectives import from_all
from megalite.train.components.component import Component, RollBack, Step
from megalite.train.components.straggler_timer import OwnProduct

EVERY = 10
"""Steps between measurements: a product takes some milliseconds."""

SMOOTHING = 0.7
"""Weight of what was measured before."""


class Balance(Component):
    """Says how fast ranks are, by dp rank; `speeds` is None where all are taken to be alike."""

    name = "balance"

    def __init__(self, config: Config, axes: Axes, device: torch.device, recorder: Recorder):
        self._shares, self._axes, self._recorder = config.batch.shares, axes, recorder
        self._micro_batch_size = config.batch.micro_batch_size
        self._product = OwnProduct(device) if self._shares == "measured" else None
        self._own: float | None = None
        self._seconds: list[float] = []
        self.speeds: tuple[float, ...] | None = None

    def load_state(self, state: dict[str, Any]) -> None:
        self._seconds = list(state.get("seconds", ()))
        if isinstance(self._shares, tuple):
            self.speeds = self._shares
        elif self._shares == "measured" and len(self._seconds) == self._axes.batch.size:
            self.speeds = tuple(1.0 / seconds for seconds in self._seconds)

    def state(self) -> dict[str, Any]:
        return {"seconds": self._seconds} if self._seconds else {}

    def speeds_from(self, step: int, sizes: BatchSizes) -> tuple[float, ...] | None:
        """The speeds by which the steps from one on are dealt out; how that one is, is said and written down."""
        if self.speeds is not None:
            counts = deal_out(sizes.size(step) // self._micro_batch_size, self.speeds)
            why = f"micro-batches of the dp ranks: {', '.join(map(str, counts))}"
            self._recorder.note("balance", step - 1, why=why, micro_batches=list(counts))
        return self.speeds

    def after_step(self, step: Step, result: StepResult) -> RollBack | None:
        if self._product is not None and (self._own is None or step.number % EVERY == 0):
            found = self._product.seconds()
            self._own = found if self._own is None else SMOOTHING * self._own + (1.0 - SMOOTHING) * found
        return None

    def before_save(self, step: int) -> RollBack | None:
        if self._product is not None:
            told = from_all((self._axes.batch.rank, self._own), self._axes.world)
            slowest = dict[int, float]()
            for rank, seconds in told:
                slowest[rank] = max(slowest.get(rank, 0.0), seconds or 0.0)
            self._seconds = [slowest[rank] for rank in sorted(slowest)]
        return None
