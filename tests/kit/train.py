"""Train a tiny model on any layout and return its curve."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megalite.config.plan import make_plan
from megalite.config.schema import Config
from megalite.engine.build import build_engine
from megalite.model.initialize import FreshWeights
from megalite.optim.schedules import learning_rate
from megalite.parallel.axes import connect
from megalite.parallel.mesh import Mesh
from tests.kit.batches import step_batches

TINY = {
    "model": {
        "hidden_size": 32,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 4,
        "ffn_hidden_size": 48,
        "vocab_size": 101,
    },
    "batch": {"micro_batch_size": 2, "global_batch_size": 8, "seq_len": 16},
    "precision": {"dtype": "fp32"},
    "optimizer": {"lr": 2e-3, "clip_grad_norm": 0.5},
    "schedule": {"name": "cosine", "warmup_steps": 3, "min_lr": 2e-4},
    "train": {"steps": 20, "compile": "off"},
}
"""A model that every layout up to tp 4, pp 4 and dp 4 divides, with clipping active at every step."""


def tiny_config(**sections: dict[str, Any]) -> Config:
    """`TINY` with some keys of some sections replaced."""
    names = {*TINY, *sections}
    return Config(**{name: {**TINY.get(name, {}), **sections.get(name, {})} for name in names})


def train(config: Config, steps: int) -> list[tuple[float, float]]:
    """Loss and gradient norm of the first steps, on the ranks of the current world."""
    world_size = dist.get_world_size()
    plan = make_plan(config, world_size)
    axes = connect(Mesh(plan.pp, plan.dp, plan.cp, plan.tp), dist.get_rank())
    source = FreshWeights(plan.model, config.run.seed)
    engine = build_engine(config, plan, axes, torch.device("cpu"), source)
    curve = []
    for step in range(steps):
        batches = step_batches(
            step,
            global_batch_size=config.batch.global_batch_size,
            micro_batch_size=config.batch.micro_batch_size,
            dp=plan.dp,
            dp_rank=axes.dp.rank,
            seq_len=config.batch.seq_len,
            vocab_size=plan.model.vocab_size,
        )
        lr = learning_rate(step + 1, plan.total_steps, config.optimizer, config.schedule)
        result = engine.train_step(batches, lr)
        curve.append((result.loss, result.grad_norm))
    engine.close()
    return curve
