"""Which weights another optimizer updates than before: its state says nothing to the new one.

A run goes on with the optimizer that it has, or with one whose state is the same (adamw and adamw8bit, muon and
muon8bit, lion and lion8bit). A branch may take another one, which then begins anew, for all weights; where the former
one averages, from the averages.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megalite.architecture.weights import weight_table
from megalite.config.fill import fill
from megalite.config.optimizers import FROZEN, RULES
from megalite.config.schema import Config, OptimizerConfig
from megalite.config.yaml_source import read_source
from megalite.optim.rules import all_rules, rule_of, state_shapes

INTERCHANGEABLE = tuple({name, f"{name}8bit"} for name in ("adamw", "muon", "lion"))
"""Optimizers, and rules, with the same state in checkpoints."""

ANY_VOCAB_SIZE = 1
"""No name depends on it."""


def changed_optimizer(former_config: Path, config: Config) -> list[str]:
    """What has another rule than by a former config, in a sentence; empty where its state goes on."""
    given: Any = read_source(former_config).data.get("optimizer") or {}
    default = OptimizerConfig()
    before, now = given.get("name", default.name), config.optimizer.name
    try:
        former = OptimizerConfig.model_validate(given)
    except ValidationError:  # it names what a plug-in has brought, and may have changed since
        former = config.optimizer.model_copy(update={"name": before})
    if not _goes_on(before, now):
        return [f"optimizer.name: {before!r} in {former_config}, {now!r} now"]
    beta, beta_now = former.betas[0], config.optimizer.betas[0]
    if beta != beta_now and any(RULES[rule].averages for rule in all_rules(former)):
        return [
            f"optimizer.betas: {beta:g} in {former_config}, {beta_now:g} now, by which the averages would be others"
        ]
    side, side_now = former.max_precondition_dim, config.optimizer.max_precondition_dim
    if former.groups == config.optimizer.groups and (side == side_now or "soap" not in all_rules(former)):
        return []
    for weight in weight_table(fill(config, ANY_VOCAB_SIZE)).values():
        had, has = rule_of(weight, former), rule_of(weight, config.optimizer)
        if has == FROZEN and RULES[had].averages:
            return [
                f"optimizer.groups: {weight.name} and maybe others are averaged in {former_config} and frozen now, "
                "which would leave them beside their averages; a branch (train.branch_from) begins from these"
            ]
        if has != FROZEN and not _goes_on(had, has):
            return [f"optimizer.groups: {weight.name} and maybe others by {had} in {former_config}, by {has} now"]
        if had == has and state_shapes(weight, former) != state_shapes(weight, config.optimizer):
            return [
                f"optimizer.max_precondition_dim: {side} in {former_config}, {side_now} now, by which the state of "
                f"{weight.name} and maybe others has another shape"
            ]
    return []


def _goes_on(before: str, now: str) -> bool:
    return before == now or any({before, now} <= family for family in INTERCHANGEABLE)
