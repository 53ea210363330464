"""A model with muP as the usual one, for those who know none: its factors multiplied into the weights."""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.architecture.architecture import Architecture, query_scale
from megalite.architecture.mup import embedding_scale, output_scale
from megalite.architecture.weights import Rectangle, Weight
from megalite.model.initialize import WeightSource


def without_mup(model: Architecture) -> Architecture:
    """The usual model that computes the same from the weights of `Folded`."""
    return model.model_copy(update={"mup": None})


class Folded:
    """Weights of a muP model with its factors multiplied in, for the usual model of the same shape.

    The factor on the logits goes into the final norm, which works for tied tables too; there the norm also takes back
    what the embedding has been multiplied by, since the table is the head as well.

    Args:
        source: of the muP model's canonical weights.
        model: filled, with muP.
    """

    def __init__(self, source: WeightSource, model: Architecture):
        self._source, self._model = source, model

    def read(self, weight: Weight, rectangle: Rectangle) -> Tensor:
        part, factor = self._source.read(weight, rectangle), self._factor(weight)
        return part if factor == 1.0 else part.to(torch.float32) * factor

    def _factor(self, weight: Weight) -> float:
        model = self._model
        if weight.layer == "embedding":
            return embedding_scale(model)
        if weight.layer == "final_norm":
            return output_scale(model) / (embedding_scale(model) if model.tie_embeddings else 1.0)
        part = "attention.q_norm." if model.qk_norm else "attention.q."
        return query_scale(model) if part in weight.name else 1.0
