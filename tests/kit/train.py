"""Train a tiny model on any layout and return its curve."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megalite.checkpoint.format import Progress
from megalite.checkpoint.precision_state import load_state
from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.writer import save
from megalite.config.plan import RunPlan, make_plan
from megalite.config.schema import Config
from megalite.data.loader import Batch
from megalite.engine.build import build_engine
from megalite.engine.protocol import Engine
from megalite.model.initialize import FreshWeights
from megalite.optim.groups import Pacing
from megalite.optim.rules import state_kinds
from megalite.optim.schedules import decay_scale, learning_rate
from megalite.parallel.axes import Axes, connect
from megalite.parallel.mesh import Mesh
from megalite.train.qk_clip import QkClip
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


AVERAGING = "averaging"
"""By which a checkpoint of a `Rank` has what its averages remember."""


def tiny_config(**sections: dict[str, Any]) -> Config:
    """`TINY` with some keys of some sections replaced."""
    names = {*TINY, *sections}
    return Config(**{name: {**TINY.get(name, {}), **sections.get(name, {})} for name in names})


@dataclass
class Rank:
    """A tiny run on one rank of the current world."""

    config: Config
    plan: RunPlan
    axes: Axes
    engine: Engine
    figures: list[dict[str, float]] = field(default_factory=list)
    """Of steps that `optimizer.qk_clip` has measured."""

    def train(self, first: int, last: int) -> list[tuple[float, float]]:
        """Loss and gradient norm of steps first+1 .. last."""
        return [self._step(step) for step in range(first, last)]

    def save(self, root: Path, step: int) -> Path:
        """Write a checkpoint of a step."""
        return save(
            root,
            self.engine,
            self.axes,
            plan=self.plan,
            progress=Progress(step=step, num_updates=step, components={AVERAGING: self.engine.averaging()}),
            config_text="",
            data={},
            device=torch.device("cpu"),
        )

    def batches(self, step: int) -> list[Batch]:
        """This rank's micro-batches of a step."""
        return step_batches(
            step,
            global_batch_size=self.config.batch.global_batch_size,
            micro_batch_size=self.config.batch.micro_batch_size,
            dp=self.plan.dp,
            dp_rank=self.axes.batch.rank,
            seq_len=self.config.batch.seq_len,
            vocab_size=self.plan.model.vocab_size,
        )

    def _step(self, step: int) -> tuple[float, float]:
        batches = self.batches(step)
        optimizer, total = self.config.optimizer, self.plan.total_steps
        lr = learning_rate(step + 1, total, optimizer, self.plan.schedule)
        own = {n: learning_rate(step + 1, total, optimizer, each) for n, each in self.plan.group_schedules.items()}
        scales = self._scales(step + 1, batches)
        self.engine.set_pacing(Pacing(decay_scale(step + 1, total, optimizer, lr), own, scales))
        result = self.engine.train_step(batches, lr)
        return result.loss, result.grad_norm

    def _scales(self, number: int, batches: list) -> dict[str, torch.Tensor]:
        settings = self.config.optimizer.qk_clip
        if settings is None:
            return {}
        step: Any = SimpleNamespace(number=number, batches=batches, figures={})
        found = QkClip(settings, self.engine, self.axes).scales(step)
        self.figures.append(step.figures)
        return found


def start_rank(config: Config, checkpoint: Path | None = None) -> Rank:
    """Build the engine of this rank from a seed, or from a checkpoint."""
    plan = make_plan(config, dist.get_world_size())
    axes = connect(Mesh(plan.pp, plan.dp, plan.cp, plan.tp, plan.ep), dist.get_rank())
    if checkpoint is None:
        source = FreshWeights(plan.model, config.run.seed)
        return Rank(config, plan, axes, build_engine(config, plan, axes, torch.device("cpu"), source))
    reader = CheckpointReader(checkpoint)
    engine = build_engine(config, plan, axes, torch.device("cpu"), reader.source("weight"))
    moments = {key: reader.source(key) for key in state_kinds()}
    engine.load(reader.source("weight"), moments, reader.manifest.progress.num_updates)
    load_state(engine, reader)
    engine.set_averaging(reader.manifest.progress.components.get(AVERAGING, {}))
    return Rank(config, plan, axes, engine)


def train(config: Config, steps: int) -> list[tuple[float, float]]:
    """Loss and gradient norm of the first steps, on the ranks of the current world."""
    rank = start_rank(config)
    curve = rank.train(0, steps)
    rank.engine.close()
    return curve
