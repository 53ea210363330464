"""A run's engine where the run stands: what a study trains with. Nothing is saved."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from megalite.checkpoint.precision_state import load_state
from megalite.checkpoint.sizes_so_far import CONTROL, sizes_at
from megalite.config.batch_sizes import BatchSizes
from megalite.config.load import in_folder
from megalite.config.plan import RunPlan
from megalite.config.schema import Config
from megalite.data.loader import Batch, Loader
from megalite.data.samples import Samples
from megalite.engine.build import build_engine, with_preference
from megalite.engine.protocol import Engine
from megalite.parallel.axes import Axes
from megalite.train.components.qat_start import begin_step
from megalite.train.place import Place
from megalite.train.preflight import preflight_stages
from megalite.train.start import Start, first_start
from megalite.train.worker import connect_rank

ASIDE = "aside"
"""Stands for a study's folder where ranks compare their runs."""


@dataclass
class Beside:
    """An engine at the place of a run."""

    config: Config
    """Of the stage that the run is in."""
    plan: RunPlan
    axes: Axes
    device: torch.device
    engine: Engine
    samples: Samples
    sizes: BatchSizes
    start: Start

    def batches(self) -> Iterator[list[Batch]]:
        """This rank's micro-batches of the steps to come, on its device. The stage is told of each step, as in a run;
        behind the last of its own it goes on with batches of that one's size."""
        last = self.plan.last_step
        loader = Loader(
            self.samples,
            micro_batch_size=self.config.batch.micro_batch_size,
            batch_sizes=self.sizes.changed(last + 1, self.sizes.size(last)),
            dp_size=self.axes.batch.size,
            dp_rank=self.axes.batch.rank,
            prefetch=self.config.data.prefetch,
        )
        for number in itertools.count(self.start.progress.step + 1):
            self._tell(number)
            yield [batch.to(self.device) for batch in loader.step_batches(number)]

    def _tell(self, number: int) -> None:
        """What a stage computes by its step: whether weights are rounded, and how much further predictions weigh."""
        qat, mtp = self.config.precision.qat, self.plan.model.mtp
        if qat is not None:
            begin_step(self.engine, number)
        if mtp is not None:
            self.engine.stage.further.weight = mtp.weight_at(number)


def start_beside(config: Config, place: Place) -> Beside:
    """Build a rank's engine where the run stands. Collective.

    Args:
        config: from `aside.aside`, so that the run's own folder is not touched.
    """
    stages, valid_sets = preflight_stages(config, place.world_size, local_rank=place.local_rank)
    everywhere = in_folder(config, Path(ASIDE))  # each rank may have a folder of its own
    axes, device = connect_rank(everywhere, stages, place, valid_sets)
    start = first_start(config, stages, axes, device)
    stage = next(each for each in stages if each.plan.goes_on_from(start.progress.step))
    config, plan = stage.config, stage.plan
    engine = build_engine(config, plan, axes, device, start.weights)
    if start.progress.num_updates or config.precision.dtype != "fp32":
        engine.load(start.weights, start.moments, start.progress.num_updates)
    load_state(engine, start.reader)
    engine.set_averaging(start.progress.components.get(CONTROL, {}).get("averaging", {}))
    engine = with_preference(engine, config, plan, axes, device, lambda: start.weights)
    samples = stage.samples.following(start.progress.account)
    sizes = sizes_at(start.progress) or plan.batch_sizes
    return Beside(config, plan, axes, device, engine, samples, sizes, start)
