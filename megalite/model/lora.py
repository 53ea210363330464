"""A model with low-rank adapters: where its layers have them, and the model without, for those who know none."""

from __future__ import annotations

from torch import Tensor, nn

from megalite.architecture.architecture import Architecture
from megalite.architecture.settings import LoraConfig
from megalite.architecture.weights import Rectangle, Weight, adapters_of, by_parameter, is_adapter, weight_table
from megalite.layers.linear import RowParallelLinear
from megalite.layers.low_rank import AdaptedPart, LowRank
from megalite.layers.precision import linear_layers
from megalite.model.initialize import WeightSource


def add_adapters(blocks: nn.ModuleDict, model: Architecture, lora: LoraConfig) -> None:
    """Give the linear layers of blocks, keyed by their index, the adapters that the table of weights has."""
    table = weight_table(model)
    fused = by_parameter(table)
    for name, layer in linear_layers(blocks):
        rows = fused[f"{name}.weight"]
        parts = [
            AdaptedPart(row.local_shape(layer.tp.size)[0], adapters_of(row, lora.rank)[0].name in table) for row in rows
        ]
        if any(part.is_adapted for part in parts):
            layer.lora = LowRank(
                layer.weight.shape[1],
                parts,
                rank=lora.rank,
                scale=lora.scale,
                tp=layer.tp,
                cuts_inputs=isinstance(layer, RowParallelLinear),
            )


def without_lora(model: Architecture) -> Architecture:
    """The usual model that computes the same from the weights of `WithAdaptersAdded`."""
    return model.model_copy(update={"lora": None})


class WithAdaptersAdded:
    """Weights of a model with adapters that are added to its layers' own, `W + scale B A` in fp32.

    Args:
        source: of the canonical weights, adapters among them.
        model: filled, with adapters.
    """

    def __init__(self, source: WeightSource, model: Architecture):
        assert model.lora is not None
        self._source, self._lora = source, model.lora
        self._table = weight_table(model)

    def read(self, weight: Weight, rectangle: Rectangle) -> Tensor:
        own = self._source.read(weight, rectangle)
        if weight.name not in self._table or len(weight.shape) != 2:
            return own
        a, b = adapters_of(weight, self._lora.rank)
        if a.name not in self._table:
            return own
        (first_row, first_column), (rows, columns) = rectangle.start, rectangle.shape
        every = self._lora.rank
        of_b = self._source.read(b, Rectangle((first_row, 0), (rows, every)))
        of_a = self._source.read(a, Rectangle((0, first_column), (every, columns)))
        return own.float().addmm(of_b.float(), of_a.float(), alpha=self._lora.scale)


class WithFreshAdapters:
    """Weights of a model without adapters, for the same with new ones.

    Args:
        source: of all but the adapters.
        fresh: of these.
    """

    def __init__(self, source: WeightSource, fresh: WeightSource):
        self._source, self._fresh = source, fresh

    def read(self, weight: Weight, rectangle: Rectangle) -> Tensor:
        return (self._fresh if is_adapter(weight.name) else self._source).read(weight, rectangle)
