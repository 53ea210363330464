"""Slow ranks, found by the same small piece of work on every one of them.

In a step all ranks wait for the slowest one, so their step times are equal and say nothing. Now and then each rank
therefore times a product of its own, which waits for no one: some milliseconds in half a minute. `train.watch`
compares.
"""

from __future__ import annotations

import time

import torch

from megalite.engine.protocol import StepResult
from megalite.train.components.component import Component, Step
from megalite.train.heartbeat import Heartbeat

PRODUCT_SIZE = {"cpu": 384, "cuda": 4096}

NUM_TRIES = 3
"""The fastest counts: what else a core was doing is not the rank's fault."""


class OwnProduct:
    """A product on a rank's device, which waits for no one else."""

    def __init__(self, device: torch.device):
        self._device = device
        size, dtype = PRODUCT_SIZE[device.type], torch.float32 if device.type == "cpu" else torch.bfloat16
        self._left, self._right = torch.ones(2, size, size, device=device, dtype=dtype)

    def seconds(self) -> float:
        """What it takes now. Waits for the device."""
        self._synchronize()
        best = float("inf")
        for _ in range(NUM_TRIES):
            start = time.perf_counter()
            self._left @ self._right
            self._synchronize()
            best = min(best, time.perf_counter() - start)
        return best

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class StragglerTimer(Component):
    """Times a product on this rank's device, when it is due.

    Args:
        heartbeat: is told; without a supervisor nothing is done.
        device: of this rank.
        every_seconds: how often.
    """

    name = "straggler_timer"

    def __init__(self, heartbeat: Heartbeat, device: torch.device, every_seconds: float):
        self._heartbeat, self._every_seconds = heartbeat, every_seconds
        self._due = time.monotonic() + every_seconds
        self._product = OwnProduct(device) if heartbeat.is_watched else None

    def after_step(self, step: Step, result: StepResult) -> None:
        self.take()

    def take(self) -> None:
        """Take the time, if it is due. Waits for the device."""
        if self._product is None or time.monotonic() < self._due:
            return
        self._heartbeat.note_product(self._product.seconds())
        self._due = time.monotonic() + self._every_seconds
