"""The model of a checkpoint: its weights, averaged where the run's optimizer averages (`optim.averaging`).

Checkpoints keep the weights that are trained, y, and z - x beside them, so that runs go on from them exactly. Whoever
takes the model for anything else than going on reads it through here.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import ValidationError
from torch import Tensor

from megalite.architecture.weights import Rectangle, Weight
from megalite.checkpoint.format import CONFIG, tensor_name
from megalite.checkpoint.reader import SLAB_BYTES, CheckpointReader
from megalite.checkpoint.run_config import run_config, section
from megalite.config.optimizers import LEAD
from megalite.config.schema import OptimizerConfig
from megalite.errors import CheckpointError
from megalite.model.initialize import WeightSource
from megalite.optim.averaging import average_of


class AveragedSource:
    """A weight source of averages.

    Args:
        beta: of the run's optimizer.
    """

    def __init__(self, reader: CheckpointReader, beta: float):
        self._weights, self._leads, self._beta = reader.source("weight"), reader.source(LEAD), beta
        self._tensors = reader.manifest.tensors

    def read(self, weight: Weight, rectangle: Rectangle) -> Tensor:
        found = self._weights.read(weight, rectangle)
        if tensor_name(LEAD, weight.name) not in self._tensors:
            return found
        return average_of(found, self._leads.read(weight, rectangle), self._beta)


def model_weights(reader: CheckpointReader) -> WeightSource:
    """The weights of the model that a checkpoint's run has come to.

    Raises:
        CheckpointError: they are averages, and its config does not say of what.
    """
    return AveragedSource(reader, _beta(reader)) if LEAD in reader.kinds() else reader.source("weight")


def model_slabs(reader: CheckpointReader, name: str, max_bytes: int = SLAB_BYTES) -> Iterator[Tensor]:
    """The same of one weight in runs of rows, as `CheckpointReader.slabs` yields them.

    Args:
        name: of the weight's tensor.
    """
    weights, lead = reader.slabs(name, max_bytes), tensor_name(LEAD, name.split("/", 1)[1])
    if lead not in reader.manifest.tensors:
        yield from weights
        return
    beta = _beta(reader)
    for weight, ahead in zip(weights, reader.slabs(lead, max_bytes), strict=True):
        yield average_of(weight, ahead, beta)


def _beta(reader: CheckpointReader) -> float:
    path = reader.folder / CONFIG
    optimizer = section(run_config(reader.folder), "optimizer")
    try:
        return OptimizerConfig.model_validate({"betas": optimizer["betas"]}).betas[0]
    except (ValidationError, KeyError) as error:
        raise CheckpointError(
            f"{path}: says no optimizer.betas, by which the averages of {reader.folder.name} are made; put the run's "
            "config back"
        ) from error
