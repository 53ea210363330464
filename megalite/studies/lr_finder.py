"""The learning-rate finder: a short training whose rate rises exponentially until the loss blows up (Smith 2017).

    rate   first, first x r, first x r^2, ... last        loss   smoothed; ends at 4 x the lowest, or when not finite

It starts where training would, from the run's newest checkpoint with its optimizer if there is one, on the same ranks,
and reads the data that comes next; for a run that has done its steps, where a new one would begin. Nothing stays: it
works in a folder of its own, which goes away, and saves nothing.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megalite.config.schema import Config
from megalite.errors import EXIT_DONE, EXIT_REQUEUE, UserError
from megalite.train.local import run_local_ranks
from megalite.train.place import Place, given_place
from megalite.train.preflight import preflight
from megalite.train.signals import hear_or_leave
from megalite.train.worker import leave, run_by, run_guarded

if TYPE_CHECKING:
    import torch

    from megalite.data.loader import Batch
    from megalite.engine.protocol import Engine
    from megalite.parallel.axes import Axes

SMOOTHING = 0.9
"""Weight of the former losses in the running mean."""

BLOWN_UP = 4.0
"""Times the lowest smoothed loss, at which the sweep ends."""

SHARE_OF_FALL = 0.5
"""The rate suggested is the one by which the smoothed loss has come so far down of all the way that it comes. Of ten
rules tried on the same sweeps it came nearest to the best rate of a grid (docs/recipe.md): the lowest point wanders
with the noise behind the fall, and the steepest one with the noise in it."""


SHARES_AROUND = (0.25, 0.9)
"""Between the rates by which so much of the fall is done lay the best rate of the grid in every one of 36 sweeps."""


@dataclass(frozen=True)
class Sweep:
    """The rates that are tried."""

    first: float = 1e-6
    last: float = 1.0
    num_steps: int = 100

    def rate(self, number: int) -> float:
        """The rate of an update, counted from 0."""
        return self.first * (self.last / self.first) ** (number / max(1, self.num_steps - 1))


@dataclass(frozen=True)
class Found:
    """What a sweep has seen."""

    rates: list[float]
    losses: list[float]
    """Smoothed, before the update with the rate beside."""
    origin: str
    """What it started from."""

    @property
    def lowest(self) -> float:
        """The rate of the lowest smoothed loss."""
        return self.rates[min(range(len(self.losses)), key=self.losses.__getitem__)]

    @property
    def fell(self) -> bool:
        """Whether the smoothed loss was ever lower than at first."""
        return min(self.losses) < self.losses[0]

    @property
    def steepest(self) -> float:
        """The rate at which the smoothed loss falls fastest over the logarithm of the rate."""
        if len(self.losses) < 2:
            return self.rates[0]
        falls = [after - before for before, after in zip(self.losses, self.losses[1:], strict=False)]
        return self.rates[min(range(len(falls)), key=falls.__getitem__)]

    @property
    def suggestion(self) -> float:
        """The peak rate to begin with, to two digits."""
        return float(f"{self.rate_by(SHARE_OF_FALL):.1e}")

    @property
    def around(self) -> tuple[float, float]:
        """The rates between which the best one is to be looked for."""
        low, high = (self.rate_by(share) for share in SHARES_AROUND)
        return low, high

    def rate_by(self, share: float) -> float:
        """The rate by which the smoothed loss has come a share of its way from the first to the lowest."""
        first, lowest = self.losses[0], min(self.losses)
        pairs = zip(self.rates, self.losses, strict=True)
        return next(rate for rate, loss in pairs if first - loss >= share * (first - lowest))


class SmoothedLoss:
    """A running mean of losses, free of its start as Adam's moments are."""

    def __init__(self) -> None:
        self._sum, self._weight = 0.0, 0.0
        self.lowest = math.inf

    def add(self, loss: float) -> float:
        """The mean with one more loss."""
        self._sum = SMOOTHING * self._sum + (1.0 - SMOOTHING) * loss
        self._weight = SMOOTHING * self._weight + (1.0 - SMOOTHING)
        mean = self._sum / self._weight
        self.lowest = min(self.lowest, mean)
        return mean


def find_rate(config: Config, world_size: int, sweep: Sweep) -> Found | None:
    """Sweep on ranks of this machine, or as the rank that this process is. None on all ranks but the first.

    Raises:
        UserError: the run cannot start, or the loss was never finite.
    """
    if not 0.0 < sweep.first < sweep.last < math.inf:
        raise UserError(
            f"--from {sweep.first:g} --to {sweep.last:g}: expected two finite rates above 0, the first the lower"
        )
    from megalite.studies.aside import aside, is_finished

    place = given_place()
    with tempfile.TemporaryDirectory(prefix="megalite-") as name:
        folder = Path(name)
        copied = aside(config, folder / "run")
        out = folder / "sweep.json"
        if place is not None:
            code = run_guarded(copied.run.dir, place, lambda: _sweep(copied, place, sweep, out))
        else:
            preflight(copied, world_size)
            arguments = [str(out), *(str(value) for value in asdict(sweep).values())]
            code = run_local_ranks(copied, world_size, "megalite.studies.lr_finder", arguments)
        if code == EXIT_REQUEUE:  # its ranks were asked to stop
            raise KeyboardInterrupt
        if code != EXIT_DONE:
            raise UserError("the sweep ended early; what its ranks said stands above")
        if not out.exists():
            return None
        found = Found(**json.loads(out.read_text(encoding="utf-8")))
        anew = f" (the run in {config.run.dir} has done all its steps; this is where a new one would begin)"
        return replace(found, origin=found.origin + anew) if is_finished(config) else found


def _sweep(config: Config, place: Place, sweep: Sweep, out: Path) -> int:
    """What each rank does; the first writes down what was seen."""
    from megalite.engine.runtime import disconnect_processes
    from megalite.studies.beside import start_beside

    beside = start_beside(config, place)
    rates, losses = raise_rate(beside.engine, beside.batches(), sweep, beside.axes, beside.device)
    beside.engine.close()
    disconnect_processes()
    if not losses:
        raise UserError("the first loss is not finite, so there is nothing to find; look for the reason in the model")
    if place.rank == 0:
        out.write_text(json.dumps(asdict(Found(rates, losses, beside.start.origin))), encoding="utf-8")
    return EXIT_DONE


def raise_rate(
    engine: Engine, batches: Iterator[list[Batch]], sweep: Sweep, axes: Axes, device: torch.device
) -> tuple[list[float], list[float]]:
    """Train until the last rate, or until the loss has blown up on some rank."""
    from megalite.engine.protocol import NonFiniteLossError
    from megalite.parallel.collectives import any_rank

    rates: list[float] = []
    losses: list[float] = []
    smoothed = SmoothedLoss()
    for number in range(sweep.num_steps):
        rate = sweep.rate(number)
        try:
            result = engine.train_step(next(batches), rate)
        except NonFiniteLossError:
            break
        if not result.num_tokens:
            continue
        is_over = not math.isfinite(result.loss)
        mean = math.inf if is_over else smoothed.add(result.loss)
        if any_rank(is_over or mean > BLOWN_UP * smoothed.lowest, axes.world, device):
            break
        rates.append(rate)
        losses.append(mean)
    return rates, losses


def main() -> None:
    """Entrance of a rank, with CONFIG.yaml OUT.json FIRST LAST STEPS in sys.argv."""
    hear_or_leave()
    config_path, out, first, last, num_steps = sys.argv[1:]
    place = given_place()
    assert place is not None, "a rank is started by megalite lr-find"
    sweep = Sweep(float(first), float(last), int(num_steps))
    leave(run_by(config_path, place, lambda config: _sweep(config, place, sweep, Path(out))))
