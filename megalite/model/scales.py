"""A model whose weights are rounded by scales that are trained: where its layers have them, and what knows none."""

from __future__ import annotations

from torch import Tensor, nn

from megalite.architecture.architecture import Architecture
from megalite.architecture.settings import WeightScales
from megalite.architecture.weights import Rectangle, Weight, by_parameter, weight_table
from megalite.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from megalite.layers.qat.learned import LearnedRounding
from megalite.model.initialize import WeightSource, first_scales
from megalite.parallel.collectives import Collective, copy_to, keep


def add_scales(blocks: nn.ModuleDict, model: Architecture, settings: WeightScales) -> None:
    """Give the linear layers of blocks, keyed by their index, the scales that the table of weights has."""
    fused = by_parameter(weight_table(model))
    for name, layer in blocks.named_modules(prefix="blocks"):
        rows = fused.get(f"{name}.learned.scale", [])
        if not rows or not isinstance(layer, (ColumnParallelLinear, RowParallelLinear, ReplicatedLinear)):
            continue
        shapes = [row.local_shape(layer.tp.size) for row in rows]
        shape = sum(rows for rows, _ in shapes), shapes[0][1]
        whole = fused[f"{name}.weight"][0].shape[1]
        layer.learned = LearnedRounding(
            shape, whole // rows[0].shape[1], settings, tp=layer.tp, share=_share(layer, settings)
        )


def _share(layer: nn.Module, settings: WeightScales) -> Collective:
    if isinstance(layer, ReplicatedLinear):
        return layer.share
    return copy_to if isinstance(layer, RowParallelLinear) and settings.group_size is None else keep


def without_scales(model: Architecture) -> Architecture:
    """The usual model; what it computes with rounded weights is said by who reads these."""
    return model.model_copy(update={"weight_scales": None})


class WithFreshScales:
    """Weights of a model without scales, or with others, for one that has them.

    Args:
        source: of the weights.
        model: that has scales.
    """

    def __init__(self, source: WeightSource, model: Architecture):
        self._source, self._model = source, model

    def read(self, weight: Weight, rectangle: Rectangle) -> Tensor:
        if weight.init == "scale":
            return first_scales(self._source, weight, rectangle, self._model)
        return self._source.read(weight, rectangle)
