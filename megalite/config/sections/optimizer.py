"""The section `optimizer`: the weight update."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt

from megalite.architecture.settings import Fp32Section
from megalite.config.brought import wrong_options
from megalite.config.optimizers import OPTIMIZERS, RULES
from megalite.config.sections.schedule import ScheduleConfig
from megalite.section import FrozenOptions, Options, Problem

Decay = Annotated[float, Field(ge=0.0, lt=1.0)]

MIN_NORMS = 10
"""Gradient norms that a percentile of them needs."""


class LearningRateScales(Fp32Section):
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


class ClipConfig(Fp32Section):
    """Clipping by something else than the norm of the whole gradient; `clip_grad_norm` comes before it."""

    by: Literal["value", "parameter", "layer", "unit", "group", "percentile"]
    """value: each number. parameter: the norm of each weight. layer: of each block, and of each weight outside. group:
    of all that one of `optimizer.groups` has together, and of all that none has. unit:
    the norm of each row, measured by that of the weights (adaptive clipping, Brock et al. 2021). percentile: the norm
    of the whole gradient, to a percentile of recent ones (Seetharaman et al. 2020); `clip_grad_norm` bounds it."""
    threshold: PositiveFloat
    """The bound: a magnitude; an L2 norm; for unit, a share of the weights' norm, such as 0.01; for percentile, a
    number below 100, such as 90."""
    window: Annotated[int, Field(ge=MIN_NORMS)] = 128
    """percentile: steps that count as recent. Nothing is clipped by it before there are ten."""


class WeightDecayConfig(Fp32Section):
    """What a weight shrinks by, and how that changes: over the run, with the rate, and with the depth."""

    kind: Literal["decoupled", "coupled", "independent"] = "decoupled"
    """decoupled: by rate x decay (Loshchilov & Hutter 2019, as torch's AdamW). coupled: decay x weight is added to the
    gradient, behind clipping (L2, as torch's Adam and SGD). independent: by decay x the rate's share of its peak,
    whatever the peak is (Wortsman et al. 2023)."""
    follows_rate: bool = False
    """Times the rate's share of its peak, so that the decay goes to zero with the rate (Defazio 2025)."""
    end_scale: NonNegativeFloat = 1.0
    """Factor on the decay at the last step; 1 for none."""
    shape: Literal["linear", "cosine"] = "linear"
    """How the factor goes from 1 to end_scale over the run."""
    layer_factor: PositiveFloat = 1.0
    """Factor with each block away from the head: block i of n has layer_factor^(n - 1 - i) times the decay, embedding
    tables that of the lowest block once more."""


class QkClipConfig(Fp32Section):
    """Attention logits that stay bounded, because weights of queries and keys shrink behind the update (Kimi K2, 2025):
    those of a head whose largest logit of the step is above a threshold."""

    threshold: PositiveFloat = 100.0
    """The largest logit, scaled as softmax gets it."""
    every: PositiveInt = 1
    """Steps from one measurement to the next. Each takes a forward pass more, and the scores of all queries in fp32."""


class WeightGroupConfig(Fp32Section):
    """Settings of some weights, by their names. What is null stays as it is for all."""

    match: Annotated[tuple[str, ...], BeforeValidator(lambda given: (given,) if isinstance(given, str) else given)]
    """Patterns of canonical names, `embedding.*` or `blocks.[0-3].attention.*`: * is any run of characters, ? is one,
    [0-3] one of some. A list has all that any of its patterns has. `megalite config weights CONFIG` shows the names. A
    weight belongs to the first group that has it."""
    but: Annotated[tuple[str, ...], BeforeValidator(lambda given: (given,) if isinstance(given, str) else given)] = ()
    """Patterns of names that the group has not, though `match` has them."""
    lr_scale: PositiveFloat = 1.0
    """Factor on the learning rate, times those of `lr_scales`."""
    weight_decay: NonNegativeFloat | None = None
    """In place of optimizer.weight_decay; norms and biases are decayed too where it is given."""
    clip_threshold: PositiveFloat | None = None
    """In place of optimizer.clip.threshold."""
    optimizer: Annotated[str, AfterValidator(OPTIMIZERS.known)] | None = None
    """Whose rule updates them, with the settings of the section; in a group of tables, muon's is that of its tables."""
    schedule: ScheduleConfig | None = None
    """The shape of their rate; its peak is optimizer.lr, as ever times the factors."""
    frozen: bool = False
    """They stay as they are: no update, no decay, no optimizer state, no part of the gradient's norm."""


class OptimizerConfig(Fp32Section):
    """The weight update."""

    name: Annotated[str, AfterValidator(OPTIMIZERS.known)] = "adamw"
    """The rule of the update: adamw, lion, adafactor, muon and soap (which leave tables, head and vectors to adamw),
    sgd; adamw8bit, lion8bit and muon8bit, whose state has 8 bits a number; schedule_free_adamw, whose model is an
    average; or one that a plug-in brings. docs/recipe.md says when to use which."""
    options: Options = Field(default_factory=FrozenOptions)
    """What a plug-in's rule may be told."""
    lr: PositiveFloat = 3e-4
    """Peak learning rate. Muon takes AdamW's; Lion wants a third to a tenth of it."""
    lr_scales: LearningRateScales = LearningRateScales()
    """Factors on the learning rate, by the kind of weight and by depth."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay of the first and second moment, each in [0, 1): adamw, lion, those of 8 bits, soap, and what muon leaves
    to AdamW. schedule_free_adamw: the share of the average where gradients are taken, and the second moment's decay."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment: adamw, adamw8bit, muon, muon8bit, soap, schedule_free_adamw."""
    momentum: Decay = 0.95
    """Decay of the momentum: muon, muon8bit, sgd."""
    nesterov: bool = True
    """Look ahead along the momentum: muon, muon8bit, sgd."""
    newton_schulz_steps: PositiveInt = 5
    """Iterations that orthogonalise the momentum of muon and muon8bit."""
    precondition_every: PositiveInt = 10
    """soap: steps from one refresh of the bases to the next. Fewer follow the gradients better, and take more time."""
    max_precondition_dim: PositiveInt = 10_000
    """soap: a side of a matrix that is longer is not turned into a basis: two squares of that side would be state."""
    factored_decay: Annotated[float, Field(gt=0.0, le=1.0)] = 0.8
    """adafactor: the second moment decays by 1 - step^-this."""
    update_clip: PositiveFloat = 1.0
    """adafactor: bound on the root mean square of a weight's update, before the learning rate."""
    weight_decay: NonNegativeFloat = 0.1
    """Decay of matrices. Norms and biases are decayed in groups that say so."""
    decay_embeddings: bool = True
    """Whether the embedding tables and the head are decayed too."""
    decay: WeightDecayConfig = WeightDecayConfig()
    """Whether decay is decoupled, and how it changes."""
    groups: tuple[WeightGroupConfig, ...] = ()
    """Settings of some weights, by their names."""
    offload: bool = False
    """Keep masters and state in the host's memory, whose processors make the update: gradients travel there once a
    step, and new weights back. Saves 12 bytes a parameter of AdamW on a GPU, and takes the time of both ways and of the
    host's update. Of the native engine (ZeRO 0 and 1)."""
    clip_grad_norm: PositiveFloat | None = 1.0
    """Scale the gradient down to this global L2 norm; null for no clipping."""
    clip: ClipConfig | None = None
    """Clipping by something else, after that; null for none."""
    qk_clip: QkClipConfig | None = None
    """Shrink weights of queries and keys where attention logits are too large; null for none."""
    centralize: bool = False
    """Take the mean off each row of the gradients of the blocks' matrices (Yong et al. 2020)."""
    noise: NonNegativeFloat = 0.0
    """Variance of normal noise on the gradients at the beginning; 0 for none (Neelakantan et al. 2015)."""
    noise_decay: NonNegativeFloat = 0.55
    """The noise's variance falls as (1 + step)^-this."""

    @property
    def names(self) -> tuple[str, ...]:
        """Every optimizer that some weight has, each once."""
        return tuple(dict.fromkeys((self.name, *(group.optimizer or self.name for group in self.groups))))

    def problems(self) -> Iterator[Problem]:
        yield from wrong_options(RULES[OPTIMIZERS[self.name].matrices].make, self.options, f"optimizer {self.name}")
