"""Optimizers by name."""

from __future__ import annotations

from functools import partial

import torch

from megalite.addition import Addition, load, made
from megalite.config.optimizers import RULES
from megalite.config.schema import OptimizerConfig
from megalite.model.initialize import stage_weights
from megalite.model.transformer import Stage
from megalite.optim.gradients import GradientChanges
from megalite.optim.groups import rates_of
from megalite.optim.optimizer import Rule, SlicedOptimizer
from megalite.optim.rules import all_rules, rule_of


def build_optimizer(
    stage: Stage, optimizer: OptimizerConfig, product_dtype: torch.dtype = torch.float32
) -> SlicedOptimizer:
    """The optimizer over a stage's parameters, to be bound to the slices that this rank updates.

    Args:
        product_dtype: format of the matrix products of rules.
    """
    names = all_rules(optimizer)
    weights = [weight for _, rows in stage_weights(stage) for weight in rows]
    return SlicedOptimizer(
        stage.parameters(),
        lr=optimizer.lr,
        rules={name: _make_rule(name, optimizer, product_dtype) for name in names},
        state={name: RULES[name].state for name in names},
        rule_of=partial(rule_of, optimizer=optimizer),
        rates_of=partial(rates_of, optimizer=optimizer, model=stage.spec.model),
        seed=stage.spec.seed,
        changes=partial(GradientChanges, optimizer, weights, seed=stage.spec.seed),
    )


def _make_rule(name: str, optimizer: OptimizerConfig, product_dtype: torch.dtype) -> Rule:
    rule = RULES[name]
    if isinstance(rule.make, Addition):
        options = optimizer.options if name == optimizer.name else {}
        return made(f"optimizer.name: {name}", rule.make.bound(options))
    return load(rule.make)(optimizer, *([product_dtype] if rule.multiplies else []))
