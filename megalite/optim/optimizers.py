"""Optimizers by name."""

from __future__ import annotations

import torch

from megalite.config.schema import OptimizerConfig
from megalite.model.transformer import Stage
from megalite.optim.groups import parameter_groups


def build_optimizer(stage: Stage, optimizer: OptimizerConfig) -> torch.optim.Optimizer:
    """The torch optimizer over a stage's parameters; the learning rate is set anew at every step."""
    return torch.optim.AdamW(
        parameter_groups(stage, optimizer),
        lr=optimizer.lr,
        betas=optimizer.betas,
        eps=optimizer.eps,
        fused=True,
    )
