"""All that one process holds of a stage, as an optimizer is told of it."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megalite.model.initialize import local_weights
from megalite.model.transformer import Stage
from megalite.optim.slices import Slice


def whole_slices(stage: Stage) -> Iterator[Slice]:
    """All that this rank holds of a stage, one slice a weight: what an optimizer updates without ZeRO."""
    parameters = dict(stage.named_parameters())
    for local in local_weights(stage):
        if math.prod(local.rectangle.shape):
            yield Slice(local, 0, {"weight": local.view(parameters[local.parameter_name].detach()).view(-1)})
