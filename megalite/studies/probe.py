"""The first steps of a run, looked at on its own ranks: `python -m megalite.studies.probe CONFIG.yaml OUT.json STEPS`.

    step 1           rate 0: loss, norm, the gradient of each canonical weight
    some more        rate 0: seconds
    the same batch   at the run's rate, over and over

Weights do not move before the last part.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch

from megalite.architecture.initial import initial
from megalite.architecture.mup import output_scale
from megalite.architecture.weights import LORA_A, weight_table
from megalite.config.schema import Config
from megalite.config.weight_groups import group_of
from megalite.data.loader import Batch
from megalite.engine.hooks import Update
from megalite.engine.runtime import disconnect_processes
from megalite.errors import EXIT_DONE
from megalite.model.initialize import FreshWeights
from megalite.parallel.collectives import all_reduce
from megalite.studies.beside import Beside, start_beside
from megalite.studies.probe_report import ProbeReport
from megalite.train.place import Place, given_place
from megalite.train.signals import hear_or_leave
from megalite.train.worker import leave, run_by

TIMED_STEPS = 4
"""Of which the first is not counted."""

WARMUP_STEPS = 10
ENOUGH = 0.1
"""Share of the first loss at which one batch is learnt."""


def probe(config: Config, place: Place, out: Path, overfit_steps: int) -> int:
    """What each rank does; the first writes down what was seen."""
    beside = start_beside(config, place)
    batches = beside.batches()
    first = next(batches)
    squares = _GradientSquares(beside)
    result = beside.engine.train_step(first, 0.0)
    squares.stop()
    silent = squares.silent()
    seconds = _seconds(beside, batches) if overfit_steps else math.nan
    overfit = _overfit(beside, first, overfit_steps)
    beside.engine.close()
    disconnect_processes()
    if place.rank == 0:
        model, weights = beside.plan.model, weight_table(beside.plan.model)
        head = initial(weights.get("head.weight") or weights["embedding.weight"], model)
        report = ProbeReport(
            loss=result.loss,
            grad_norm=result.grad_norm,
            vocab_size=model.vocab_size,
            logit_variance=model.hidden_size * (head.std * output_scale(model)) ** 2,
            origin=beside.start.origin,
            is_fresh=isinstance(beside.start.weights, FreshWeights),
            num_weights=len(weights),
            silent=silent,
            seconds=seconds,
            overfit=overfit,
        )
        out.write_text(json.dumps(asdict(report)), encoding="utf-8")
    return EXIT_DONE


class _GradientSquares:
    """Adds up the squares of each canonical weight's gradient, over all ranks."""

    def __init__(self, beside: Beside):
        optimizer = beside.config.optimizer
        self._beside, self._names = beside, list(weight_table(beside.plan.model))
        self._frozen = {name for name in self._names if (group := group_of(name, optimizer)) and group.frozen}
        self._frozen |= {name for name in self._names if name.endswith(LORA_A)}  # which has none while B is zero
        self._sums = torch.zeros(len(self._names), dtype=torch.float64, device=beside.device)
        self.stop = beside.engine.hooks.around_update.add(self._look)

    def silent(self) -> list[str]:
        """Weights without any gradient. Collective."""
        sums = all_reduce(self._sums, self._beside.axes.world).tolist()
        return [name for name, sum in zip(self._names, sums, strict=True) if sum == 0.0 and name not in self._frozen]

    def _look(self, update: Update) -> None:
        places = {name: place for place, name in enumerate(self._names)}
        for part, gradient in zip(self._beside.engine.slices(), self._beside.engine.gradients(), strict=True):
            self._sums[places[part.local.weight.name]] += gradient.double().square().sum()
        update()


def _seconds(beside: Beside, batches: Iterator[list[Batch]]) -> float:
    """Of a step with its data, the slowest rank's."""
    taken = []
    for batch in itertools.islice(batches, TIMED_STEPS):
        begun = time.perf_counter()
        beside.engine.train_step(batch, 0.0)  # it ends with a look at loss and norm
        taken.append(time.perf_counter() - begun)
    return median(taken[1:])


def _overfit(beside: Beside, batch: list[Batch], num_steps: int) -> list[float]:
    """The losses of one batch, at the run's peak rate behind a short warmup."""
    losses: list[float] = []
    for number in range(1, num_steps + 1):
        lr = beside.config.optimizer.lr * min(1.0, number / WARMUP_STEPS)
        losses.append(beside.engine.train_step(batch, lr).loss)
        if losses[-1] <= ENOUGH * losses[0]:
            break
    return losses


def main() -> None:
    """Entry of a rank."""
    hear_or_leave()
    config_path, out, overfit_steps = sys.argv[1:]
    place = given_place()
    assert place is not None, "a rank is started by megalite doctor"
    leave(run_by(config_path, place, lambda config: probe(config, place, Path(out), int(overfit_steps))))
