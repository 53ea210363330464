"""Optimizers by name."""

from __future__ import annotations

from functools import partial

import torch

from megalite.config.schema import OptimizerConfig
from megalite.model.initialize import local_weights
from megalite.model.transformer import Stage
from megalite.optim.adafactor import Adafactor
from megalite.optim.adamw8bit import AdamW8bit
from megalite.optim.elementwise import AdamW, Lion, Sgd
from megalite.optim.gradients import GradientChanges
from megalite.optim.groups import rates_of
from megalite.optim.muon import Muon
from megalite.optim.optimizer import Rule, SlicedOptimizer
from megalite.optim.rules import rule_of


def build_optimizer(
    stage: Stage, optimizer: OptimizerConfig, product_dtype: torch.dtype = torch.float32
) -> SlicedOptimizer:
    """The optimizer over a stage's parameters, to be bound to the slices that this rank updates.

    Args:
        product_dtype: format of Muon's matrix products.
    """
    rules_of: dict[str, dict[str, Rule]] = {
        "adamw": {"adamw": AdamW(optimizer)},
        "adamw8bit": {"adamw8bit": AdamW8bit(optimizer), "adamw": AdamW(optimizer)},
        "lion": {"lion": Lion(optimizer)},
        "adafactor": {"adafactor": Adafactor(optimizer)},
        "muon": {"muon": Muon(optimizer, product_dtype), "adamw": AdamW(optimizer)},
        "sgd": {"sgd": Sgd(optimizer)},
    }
    return SlicedOptimizer(
        stage.parameters(),
        lr=optimizer.lr,
        rules=rules_of[optimizer.name],
        rule_of=partial(rule_of, optimizer=optimizer),
        rates_of=partial(rates_of, optimizer=optimizer, model=stage.spec.model),
        seed=stage.spec.seed,
        changes=partial(
            GradientChanges, optimizer, [local.weight for local in local_weights(stage)], seed=stage.spec.seed
        ),
    )
