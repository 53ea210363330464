"""What another rotation does to weights that were trained without it: measured before the first step, and said.

A raised theta or a stretch lets a model read further, once it is trained with it. Until then far positions may be
better and near ones worse, and a wrong factor shows as a loss that no training at this rate repairs soon. So the loss
by position stands in the log, as the weights were rotated and as they are now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.architecture.architecture import Architecture
from megalite.data.loader import Batch, Loader
from megalite.data.samples import Samples
from megalite.engine.protocol import Engine
from megalite.monitor.recorder import Recorder
from megalite.parallel.axes import Axes
from megalite.parallel.collectives import all_reduce
from megalite.train.evaluation.positions import RangeLoss, in_ranges, told
from megalite.train.preflight import ReadyStage


@dataclass(frozen=True)
class RotationChange:
    """The same weights on the same tokens, by position."""

    before: list[RangeLoss]
    """Rotated as they were trained."""
    now: list[RangeLoss]
    """Rotated as the run does."""

    @property
    def why(self) -> str:
        """For people."""
        return f"loss by position as the weights were rotated: {told(self.before)}; as they are now: {told(self.now)}"


def is_rotated_otherwise(theirs: Architecture, ours: Architecture) -> bool:
    """Whether two models turn queries and keys in different ways."""
    rotations = [(each.positions, each.rope, each.sliding_rope) for each in (theirs, ours)]
    return theirs.positions == ours.positions == "rope" and rotations[0] != rotations[1]


def tell_rotation(recorder: Recorder, change: RotationChange, step: int) -> None:
    """Write down and say what was measured."""
    before, now = ([each.record() for each in ranges] for ranges in (change.before, change.now))
    recorder.event("rotation_changed", step, before=before, now=now)
    recorder.say(f"another rotation: {change.why}")


def measure_rotation(
    theirs: Architecture, stage: ReadyStage, engine: Engine, samples: Samples, axes: Axes, step: int
) -> RotationChange:
    """The loss by position of the batch that comes next, under both rotations. Collective.

    Args:
        theirs: the model that the weights were trained as.
        stage: that the run is in.
        samples: that it reads.
        step: the last one that was done.
    """
    loader = Loader.for_run(
        samples, stage.config, stage.plan.batch_sizes, dp_size=axes.batch.size, dp_rank=axes.batch.rank
    )
    device = next(engine.stage.parameters()).device
    batches = [batch.to(device) for batch in loader.step_batches(step + 1)]
    found = []
    for model in (theirs, stage.plan.model):  # the run's comes last, and stays
        engine.stage.rotate_as(model)
        with engine.averaged_weights():
            losses = engine.token_losses(batches)
        found.append(_by_position(losses, batches, axes, stage.config.batch.seq_len))
    return RotationChange(*found)


def _by_position(losses: Sequence[Tensor], batches: Sequence[Batch], axes: Axes, length: int) -> list[RangeLoss]:
    sums, counts = torch.zeros(2, length, dtype=torch.float64, device=losses[0].device)
    for own, batch in zip(losses, batches, strict=True):
        valid = batch.loss_mask
        sums.index_add_(0, batch.positions[valid], own[valid].double())
        counts.index_add_(0, batch.positions[valid], torch.ones_like(own[valid], dtype=torch.float64))
    return in_ranges(all_reduce(sums, axes.batch), all_reduce(counts, axes.batch))
