"""Where a stage's weights come from: a source that yields any rectangle of any canonical weight.

Fresh weights, a checkpoint and a Hugging Face folder are all sources, so a model starts the same way from each and in
every layout. Fresh weights are drawn whole, from a seed made of the weight's name, and then cut: every layout starts
from equal weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from megalite.architecture.architecture import Architecture
from megalite.architecture.initial import Initial, initial
from megalite.architecture.weights import SCALE, Rectangle, Weight, by_parameter, weight_table
from megalite.model.spec import StageSpec
from megalite.parallel.random import name_seed

CUT_MARK = "tensor_model_parallel"
"""Attribute of a parameter by which DeepSpeed tells cut ones from replicated ones in a gradient norm."""


EXPERT_MARK = "is_of_experts"
"""Attribute of a parameter that holds weights of experts, which expert-parallel ranks have others of."""


class WeightSource(Protocol):
    """Yields parts of canonical weights."""

    def read(self, weight: Weight, rectangle: Rectangle) -> Tensor:
        """The rectangle of the weight, of `rectangle.shape`, on the CPU; not to be written to."""
        ...


class FreshWeights:
    """Initial weights, by default N(0, init_std), residual projections narrower by sqrt(2 x num_layers), norms 1,
    biases 0; `architecture.initial` has every rule. Scales of rounded weights follow from these.

    The scaled residual initialisation is GPT-2's (Radford et al. 2019, section 2.3) and Megatron-LM's.
    """

    def __init__(self, model: Architecture, seed: int):
        self.model, self.seed = model, seed

    def read(self, weight: Weight, rectangle: Rectangle) -> Tensor:
        if weight.init == "scale":
            return first_scales(self, weight, rectangle, self.model)
        if weight.init in ("ones", "zeros"):
            return torch.full(rectangle.shape, 1.0 if weight.init == "ones" else 0.0)
        generator = torch.Generator().manual_seed(name_seed(self.seed, weight.name))
        return _draw(weight.shape, initial(weight, self.model), generator)[rectangle.slices]


def first_scales(source: WeightSource, scales: Weight, rectangle: Rectangle, model: Architecture) -> Tensor:
    """Some of the scales that a weight begins with: `2 mean |w| / sqrt(n)` of each group, n being the largest integer
    (Esser et al. 2020); for a group of zeros that of numbers of deviation `init_std`.

    Args:
        source: of the weight.
        scales: the row of the scales.
    """
    settings = model.weight_scales
    assert settings is not None
    weight = weight_table(model, {int(scales.layer.split(".")[1])})[scales.name.removesuffix(SCALE) + "weight"]
    size = weight.shape[1] // scales.shape[1]
    (row, group), (rows, groups) = rectangle.start, rectangle.shape
    numbers = source.read(weight, Rectangle((row, group * size), (rows, groups * size)))
    means = numbers.double().abs().unflatten(1, (groups, size)).mean(2)
    usual = model.init_std * math.sqrt(2.0 / math.pi)
    return (torch.where(means > 0.0, means, usual) * 2.0 / math.sqrt(settings.largest)).float()


def _draw(shape: tuple[int, ...], wanted: Initial, generator: torch.Generator) -> Tensor:
    """Numbers of a distribution, fp32."""
    drawn = torch.empty(shape)
    if wanted.is_uniform:
        assert wanted.bound is not None
        return drawn.uniform_(-wanted.bound, wanted.bound, generator=generator)
    drawn.normal_(0.0, wanted.std, generator=generator)
    if wanted.cut is not None:
        # Drawn again, not by the inverse of a distribution: that function's last bits are a matter of the CPU
        while (beyond := drawn.abs() > wanted.cut).any():
            drawn[beyond] = torch.empty(int(beyond.sum())).normal_(0.0, wanted.std, generator=generator)
    return drawn


class WithFreshPredictions:
    """Weights of a model that predicted the next token alone, for one that predicts further.

    Args:
        source: of all but the layers that do.
        fresh: of these.
    """

    def __init__(self, source: WeightSource, fresh: WeightSource):
        self._source, self._fresh = source, fresh

    def read(self, weight: Weight, rectangle: Rectangle) -> Tensor:
        return (self._fresh if weight.layer.startswith("mtp.") else self._source).read(weight, rectangle)


class HoldsWeights(Protocol):
    """What is known here of a stage."""

    spec: StageSpec

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """As torch modules have it."""
        ...


class LocalWeight:
    """A canonical weight's part on this rank, as a view into the parameter that holds it.

    `view(tensor)` takes the part out of any tensor shaped like the parameter: the weight, its gradient, a moment.
    """

    def __init__(self, weight: Weight, rectangle: Rectangle, parameter_name: str, first_row: int):
        self.weight = weight
        self.rectangle = rectangle
        self.parameter_name = parameter_name
        self.first_row = first_row
        """In the parameter."""

    def view(self, tensor: Tensor) -> Tensor:
        rows = self.rectangle.shape[0]
        return tensor[self.first_row : self.first_row + rows]


def stage_weights(stage: HoldsWeights) -> Iterator[tuple[str, list[Weight]]]:
    """Each parameter of a stage with the canonical weights that it holds on this rank or, being experts', on others, in
    the table's order; a tied copy of the head comes last."""
    groups = by_parameter(weight_table(stage.spec.model))
    for name, _ in stage.named_parameters():
        is_tied = name == "head.weight" and stage.spec.model.tie_embeddings
        yield name, groups["embedding.weight" if is_tied else name]


def local_weights(stage: HoldsWeights) -> Iterator[LocalWeight]:
    """The canonical weights that a stage holds on this rank, in the same order."""
    tp, ep = stage.spec.tp, stage.spec.ep
    for name, rows in stage_weights(stage):
        first_row = 0
        for row in (row for row in rows if row.is_held(ep.size, ep.rank)):
            yield LocalWeight(row, row.local(tp.size, tp.rank), name, first_row)
            first_row += row.local_shape(tp.size)[0]


def mark(stage: HoldsWeights) -> None:
    """Say of every parameter what it is; see the marks."""
    parameters = dict(stage.named_parameters())
    for name, rows in stage_weights(stage):
        setattr(parameters[name], CUT_MARK, rows[0].cut is not None and stage.spec.tp.size > 1)
        setattr(parameters[name], EXPERT_MARK, rows[0].expert is not None)


@torch.no_grad()
def fill(stage: HoldsWeights, source: WeightSource) -> None:
    """Set every parameter of a stage from a source, and mark it; vocabulary padding becomes zero."""
    mark(stage)
    parameters = dict(stage.named_parameters())
    num_filled = dict.fromkeys(parameters, 0)
    for local in local_weights(stage):
        parameter = parameters[local.parameter_name]
        local.view(parameter).copy_(source.read(local.weight, local.rectangle))
        num_filled[local.parameter_name] += local.rectangle.shape[0]
    for name, num_rows in num_filled.items():
        parameters[name][num_rows:].zero_()
