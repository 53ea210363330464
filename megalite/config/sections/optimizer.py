"""The section `optimizer`: the weight update."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt

from megalite.config.brought import wrong_options
from megalite.config.optimizers import OPTIMIZERS, RULES
from megalite.section import FrozenOptions, Options, Problem, Section

Decay = Annotated[float, Field(ge=0.0, lt=1.0)]

MIN_NORMS = 10
"""Gradient norms that a percentile of them needs."""


class LearningRateScales(Section):
    """Factors on the learning rate, by the kind of weight and by depth."""

    embedding: PositiveFloat = 1.0
    """Of the embedding tables; a tied table has this one too."""
    head: PositiveFloat = 1.0
    """Of the output matrix, when it is not tied."""
    vectors: PositiveFloat = 1.0
    """Of norms and biases."""
    layer_decay: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Layer-wise decay: the rate falls by this factor with each block away from the head. 1 for none; below 1 suits
    continued training, where the lowest blocks should move least (Howard & Ruder 2018)."""


class ClipConfig(Section):
    """Clipping by something else than the norm of the whole gradient; `clip_grad_norm` comes before it."""

    by: Literal["value", "parameter", "layer", "unit", "percentile"]
    """value: each number. parameter: the norm of each weight. layer: of each block, and of each weight outside. unit:
    the norm of each row, measured by that of the weights (adaptive clipping, Brock et al. 2021). percentile: the norm
    of the whole gradient, to a percentile of recent ones (Seetharaman et al. 2020); `clip_grad_norm` bounds it."""
    threshold: PositiveFloat
    """The bound: a magnitude; an L2 norm; for unit, a share of the weights' norm, such as 0.01; for percentile, a
    number below 100, such as 90."""
    window: Annotated[int, Field(ge=MIN_NORMS)] = 128
    """percentile: steps that count as recent. Nothing is clipped by it before there are ten."""


class OptimizerConfig(Section):
    """The weight update."""

    name: Annotated[str, AfterValidator(OPTIMIZERS.known)] = "adamw"
    """The rule of the update: adamw, adamw8bit, lion, adafactor, muon (which leaves tables, head and vectors to adamw),
    sgd, or one that a plug-in brings. docs/recipe.md says when to use which."""
    options: Options = Field(default_factory=FrozenOptions)
    """What a plug-in's rule may be told."""
    lr: PositiveFloat = 3e-4
    """Peak learning rate. Muon takes AdamW's; Lion wants a third to a tenth of it."""
    lr_scales: LearningRateScales = LearningRateScales()
    """Factors on the learning rate, by the kind of weight and by depth."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay of the first and second moment, each in [0, 1): adamw, adamw8bit, lion, and what muon leaves to AdamW."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment: adamw, adamw8bit, muon."""
    momentum: Decay = 0.95
    """Decay of the momentum: muon, sgd."""
    nesterov: bool = True
    """Look ahead along the momentum: muon, sgd."""
    newton_schulz_steps: PositiveInt = 5
    """Iterations that orthogonalise muon's momentum."""
    factored_decay: Annotated[float, Field(gt=0.0, le=1.0)] = 0.8
    """adafactor: the second moment decays by 1 - step^-this."""
    update_clip: PositiveFloat = 1.0
    """adafactor: bound on the root mean square of a weight's update, before the learning rate."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled decay of matrices. Norms and biases are never decayed."""
    decay_embeddings: bool = True
    """Whether the embedding tables and the head are decayed too."""
    clip_grad_norm: PositiveFloat | None = 1.0
    """Scale the gradient down to this global L2 norm; null for no clipping."""
    clip: ClipConfig | None = None
    """Clipping by something else, after that; null for none."""
    centralize: bool = False
    """Take the mean off each row of the gradients of the blocks' matrices (Yong et al. 2020)."""
    noise: NonNegativeFloat = 0.0
    """Variance of normal noise on the gradients at the beginning; 0 for none (Neelakantan et al. 2015)."""
    noise_decay: NonNegativeFloat = 0.55
    """The noise's variance falls as (1 + step)^-this."""

    def problems(self) -> Iterator[Problem]:
        yield from wrong_options(RULES[OPTIMIZERS[self.name].matrices].make, self.options, f"optimizer {self.name}")
