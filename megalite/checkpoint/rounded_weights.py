"""The weights that a run with `precision.qat` computes with: those of its checkpoints, rounded as in its forward pass.

Checkpoints keep the weights that are trained, unrounded, so that runs go on from them exactly. Whoever computes with a
model or hands it on reads it through here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import ValidationError
from torch import Tensor

from megalite.architecture.weights import Rectangle, Weight, scale_of
from megalite.checkpoint.averaged_weights import model_weights
from megalite.checkpoint.format import CONFIG
from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.run_config import run_config, section
from megalite.config.rounded import is_rounded
from megalite.config.schema import QatConfig
from megalite.errors import CheckpointError
from megalite.layers.qat.integers import Integers, to_integers
from megalite.model.initialize import WeightSource

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class RunRounding:
    """How a run rounds its weights."""

    qat: QatConfig
    dtype: torch.dtype
    """That it computes in: a weight is rounded to it before, and scales have it."""
    num_layers: int


def rounding_of(reader: CheckpointReader) -> RunRounding | None:
    """How the run that wrote a checkpoint rounded its weights at that step; None if it did not.

    Raises:
        CheckpointError: its config is damaged, or has settings that this megalite does not know.
    """
    path = reader.folder / CONFIG
    precision = section(run_config(reader.folder), "precision")
    if precision.get("qat") is None:
        return None
    found = precision["qat"]
    try:
        qat = QatConfig.model_validate(found)
        dtype = DTYPES[precision["dtype"]]
    except (ValidationError, KeyError) as error:
        raise CheckpointError(f"{path}: precision.qat is none that is known here: {found}") from error
    if reader.manifest.progress.step < qat.start_step:
        return None
    return RunRounding(qat, dtype, int(reader.manifest.model["num_layers"]))


class RoundedSource:
    """A weight source as the forward pass of a run sees it.

    Args:
        source: of the weights that are trained.
    """

    def __init__(self, source: WeightSource, rounding: RunRounding):
        self._source, self.rounding = source, rounding

    def rounds(self, weight: Weight) -> bool:
        """Whether a weight is one that is rounded."""
        return is_rounded(weight, self.rounding.qat, self.rounding.num_layers)

    def integers(self, weight: Weight, start: int, count: int) -> Integers:
        """Some rows of a weight that is rounded, whole ones."""
        numbers = self._read(weight, start, count)
        if not self.rounding.qat.learned_scales:
            return to_integers(numbers, self.rounding.qat)
        scales = self._read(scale_of(weight, self.rounding.qat.group_size), start, count)
        return to_integers(numbers, self.rounding.qat, scale=scales)

    def read(self, weight: Weight, rectangle: Rectangle) -> Tensor:
        if not self.rounds(weight):
            return self._source.read(weight, rectangle)
        found = self.integers(weight, rectangle.start[0], rectangle.shape[0])
        exact = found._replace(q=found.q.float(), scale=found.scale.float())
        first, width = rectangle.start[1], rectangle.shape[1]
        return exact.values()[:, first : first + width]

    def _read(self, weight: Weight, start: int, count: int) -> Tensor:
        """Whole rows as the forward pass has them."""
        rows = Rectangle((start, 0), (count, weight.shape[1]))
        return self._source.read(weight, rows).to(self.rounding.dtype)


def computing_weights(reader: CheckpointReader) -> WeightSource:
    """The weights that a checkpoint's run is evaluated with: averaged and rounded, as its settings say."""
    source, rounding = model_weights(reader), rounding_of(reader)
    return source if rounding is None else RoundedSource(source, rounding)
