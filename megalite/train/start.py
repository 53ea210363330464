"""Where a run's weights come from: its own newest checkpoint, another model, or a seed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.checkpoint import catalog
from megalite.checkpoint.format import MANIFEST, Progress
from megalite.checkpoint.reader import CheckpointReader
from megalite.config.plan import RunPlan
from megalite.config.schema import Config
from megalite.data.samples import Samples
from megalite.engine.protocol import MOMENTS
from megalite.errors import CheckpointError
from megalite.model.initialize import FreshWeights, WeightSource
from megalite.model.weights import Rectangle, Weight
from megalite.parallel.axes import Axes
from megalite.parallel.collectives import any_rank


class ZeroMoments:
    """Moments of an optimizer that has not stepped yet."""

    def read(self, weight: Weight, rectangle: Rectangle) -> Tensor:
        return torch.zeros(rectangle.shape)


@dataclass(frozen=True)
class Start:
    """The state a run starts from."""

    weights: WeightSource
    moments: dict[str, WeightSource]
    progress: Progress = field(default_factory=Progress)
    origin: str = ""
    """For people: where the weights come from."""
    damaged: tuple[str, ...] = ()
    """What is wrong with newer checkpoints that had to be passed over."""


def choose_start(config: Config, plan: RunPlan, samples: Samples, axes: Axes, device: torch.device) -> Start:
    """Find the state to start from. Collective: ranks share the checking of files.

    Raises:
        CheckpointError: every checkpoint of the run is damaged, or the data is not what the run was trained on.
    """
    zeros: dict[str, WeightSource] = {key: ZeroMoments() for key in MOMENTS}
    damaged: list[str] = []
    for folder in _newest_first(config.run.dir / catalog.CHECKPOINTS, axes):
        problems = _verify(folder, axes, device)
        if problems is None:
            reader = CheckpointReader(folder)
            _check_data(reader, samples)
            moments: dict[str, WeightSource] = {key: reader.source(key) for key in MOMENTS}
            return Start(
                reader.source("weight"), moments, reader.manifest.progress, f"checkpoint {folder}", tuple(damaged)
            )
        damaged += problems
    if damaged:
        raise CheckpointError(
            "no checkpoint of this run is whole:\n  "
            + "\n  ".join(damaged)
            + f"\nremove {config.run.dir / catalog.CHECKPOINTS} to start anew, or set run.dir to a new folder"
        )
    init_from = config.train.init_from
    if init_from is not None:
        return Start(_open_weights(init_from, plan, axes, device), zeros, origin=f"weights of {init_from}")
    return Start(FreshWeights(plan.model, config.run.seed), zeros, origin=f"fresh weights, seed {config.run.seed}")


def _newest_first(root: Path, axes: Axes) -> list[Path]:
    """The run's checkpoints as the first rank sees them: on a network other nodes may see them a while later.

    A folder without manifest is among them, to be named: it was whole when it got its name. Collective.
    """
    names = [path.name for path in reversed(catalog.named(root))]
    if axes.world.size > 1:
        shared = [names]
        dist.broadcast_object_list(shared, src=0, group=axes.world.group)
        names = shared[0]
    return [root / name for name in names]


def _verify(folder: Path, axes: Axes, device: torch.device) -> list[str] | None:
    """What is wrong with a checkpoint, or None. Each rank checks its share of the files."""
    problems = _damage(folder, axes.global_rank, axes.world.size)
    if not any_rank(bool(problems), axes.world, device):
        return None
    return _damage(folder, 0, 1)  # once more, all of it: every rank tells the whole story


def _damage(folder: Path, first: int, stride: int) -> list[str]:
    try:
        return CheckpointReader(folder).verify(first, stride)
    except CheckpointError as error:
        return [str(error)]


def _check_data(reader: CheckpointReader, samples: Samples) -> None:
    trained_on = reader.manifest.data.get("fingerprint")
    if trained_on is not None and trained_on != samples.fingerprint:
        raise CheckpointError(
            f"{reader.folder}: trained on data with fingerprint {trained_on}, data.train now has "
            f"{samples.fingerprint}; put the data back, or start a new run from these weights: run.dir=NEW "
            f"train.init_from={reader.folder}"
        )


def _open_weights(folder: Path, plan: RunPlan, axes: Axes, device: torch.device) -> WeightSource:
    """The weights of a checkpoint, of a run's newest one, or of a Hugging Face folder. Collective."""
    checkpoint = folder if (folder / MANIFEST).is_file() else catalog.latest(folder)
    if checkpoint is None:
        from megalite.checkpoint.hf.importer import HuggingFaceWeights

        return HuggingFaceWeights(folder, plan.model)
    problems = _verify(checkpoint, axes, device)
    if problems is not None:
        raise CheckpointError(f"train.init_from: {checkpoint} is damaged:\n  " + "\n  ".join(problems))
    return CheckpointReader(checkpoint).source("weight")
