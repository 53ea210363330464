"""The coordinate check of muP: do updates change every layer's output by as much at any width?

    for each width, with muP and without:
        a few steps on one batch, the same tokens for all
        mean |output after - output before|, for each kind of layer and the logits

Under muP the change does not depend on the width, so a rate tuned on a narrow model suits a wide one; in the usual
parametrization it grows (Yang et al. 2022, section 5 and figure 5). The slope of log change over log width says so in
one number. Runs in this process, on one rank, through the engine that trains.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megalite.config.checks_model import check_model
from megalite.config.checks_moe import check_moe
from megalite.config.checks_optimizer import check_optimizer
from megalite.config.fill import fill
from megalite.config.optimizers import OPTIMIZERS, scales_with_width
from megalite.config.plan import make_plan
from megalite.config.schema import Config, ModelConfig, MupConfig
from megalite.config.wording import or_
from megalite.data.loader import Batch
from megalite.engine.batch_cut import documents_of_batch
from megalite.errors import ConfigError, UserError
from megalite.model.transformer import Stage
from megalite.monitor.curves import Curve

FLAT_SLOPE = 0.4
"""A slope between minus and plus this is called flat: without muP, layers of small Transformers grow with 0.8 to 1.7.
Narrow models fall a little, the logits by up to -0.33: what the first weights of the head make of a changed stream
fades with the root of the width."""

SEQUENCES, SEQ_LEN = 4, 64
"""The batch. Small: a check of a few widths takes seconds on a CPU."""


@dataclass(frozen=True)
class Coordinates:
    """How far the outputs of a model moved, by layer."""

    width: int
    changes: dict[str, float]


@dataclass(frozen=True)
class Check:
    """The changes at every width, with muP and without."""

    with_mup: list[Coordinates]
    without: list[Coordinates]

    def slopes(self, runs: Sequence[Coordinates]) -> dict[str, float]:
        """By layer: the exponent of the width that its change grows with."""
        widths = [math.log(run.width) for run in runs]
        return {layer: _slope(widths, [math.log(run.changes[layer]) for run in runs]) for layer in runs[0].changes}

    def curves(self) -> list[Curve]:
        """The changes over the width, for a figure."""
        return [
            Curve(layer, [run.width for run in runs], [run.changes[layer] for run in runs], panel=panel)
            for panel, runs in (("mean change, with muP", self.with_mup), ("mean change, without", self.without))
            for layer in runs[0].changes
        ]

    @property
    def is_flat(self) -> bool:
        """Whether no layer's change depends on the width under muP."""
        return all(abs(slope) < FLAT_SLOPE for slope in self.slopes(self.with_mup).values())


def parse_widths(text: str) -> list[int]:
    """`64,128,256`, in rising order.

    Raises:
        UserError: it is written otherwise, or names fewer than two widths.
    """
    parts = text.split(",")
    widths = sorted({int(part) for part in parts if part.strip().isdecimal() and int(part)})
    if len(widths) < 2 or len(widths) < len(parts):
        raise UserError(f"--widths: found {text}, expected two or more different hidden sizes; write 64,128,256")
    return widths


def check_mup(
    config: Config, widths: Sequence[int], *, num_steps: int, lr: float, vocab_size: int, is_connected: bool = False
) -> Check:
    """Train a config's model at several widths for a few steps, with muP and without.

    Args:
        widths: hidden sizes; heads and the MLP grow in proportion.
        num_steps: updates between the two looks.
        lr: rate of the updates; small, so that none of the models leaves the neighbourhood of its start.
        vocab_size: of the models; a small one suffices.
        is_connected: this process is a world of one rank already.

    Raises:
        UserError: a width cannot have whole heads, no rule is known for a part of the model or the optimizer, or a
            layer does not move.
    """
    if not scales_with_width(config.optimizer.name):
        known = or_(name for name in OPTIMIZERS if scales_with_width(name))
        raise UserError(
            f"optimizer.name: how {config.optimizer.name} scales with the width is not known here; use {known}"
        )
    if not lr > 0.0:
        raise UserError(f"--lr: found {lr:g}, expected a rate above 0")
    mup = config.model.mup or MupConfig(base_hidden_size=min(widths))
    changed = {"vocab_size": vocab_size, "max_positions": None}  # as many positions as the batch here needs
    models = [widened(config.model, width).model_copy(update=changed) for width in widths]
    _refuse(config, [model.model_copy(update={"mup": mup}) for model in models], num_steps)
    runs = []
    with nullcontext() if is_connected else _one_rank():
        for chosen in (mup, None):
            versions = [model.model_copy(update={"mup": chosen}) for model in models]
            runs.append([Coordinates(model.hidden_size, _changes(config, model, num_steps, lr)) for model in versions])
    return Check(*runs)


def widened(model: ModelConfig, width: int) -> ModelConfig:
    """The model at another width: as many channels a head, more heads, the MLP in proportion.

    Raises:
        UserError: that would need parts of heads.
    """
    sizes: dict[str, int] = {}
    if model.mla is None:  # whose heads have widths of their own
        sizes["head_dim"] = model.head_dim or model.hidden_size // model.num_heads
    for key in ("num_heads", "num_kv_heads", "ffn_hidden_size"):
        value = getattr(model, key)
        if value is None:
            continue
        sizes[key], rest = divmod(value * width, model.hidden_size)
        if rest:
            raise UserError(
                f"--widths: at width {width}, {key}={value} of width {model.hidden_size} would be "
                f"{value * width / model.hidden_size:g}; use widths that are multiples of "
                f"{model.hidden_size // math.gcd(model.hidden_size, value)}"
            )
    return model.model_copy(update={**sizes, "hidden_size": width, "preset": None})


def _refuse(config: Config, models: Sequence[ModelConfig], num_steps: int) -> None:
    """Refuse what no rule of muP is known for, or cannot be trained at a width, before anything is.

    Raises:
        ConfigError: with all of it.
    """
    problems: list[str] = []
    for model in models:
        small = _small(config, model, num_steps)
        filled = fill(small, 1)
        problems += check_model(small, filled)
        problems += check_moe(small, filled, 1)
        problems += check_optimizer(small, filled)
    for number, group in enumerate(config.optimizer.groups):
        if group.frozen and config.model.lora is None:
            problems.append(f"optimizer.groups.{number}.frozen: every layer has to learn to be looked at; use false")
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))


def _small(config: Config, model: ModelConfig, num_steps: int) -> Config:
    """A run of a few steps of a model, with the config's optimizer."""
    changed = {
        "model": model.model_dump(),
        "parallel": {"zero_stage": 0},
        "batch": {"micro_batch_size": SEQUENCES, "global_batch_size": SEQUENCES, "seq_len": SEQ_LEN},
        "precision": {"dtype": "fp32"},
        "optimizer": config.optimizer.model_dump(),
        "schedule": {"name": "constant", "warmup_steps": 0},
        "train": {"steps": num_steps, "compile": "off", "device": "cpu"},
    }
    return Config.model_validate(changed)


def _changes(config: Config, model: ModelConfig, num_steps: int, lr: float) -> dict[str, float]:
    from megalite.engine.build import build_engine
    from megalite.model.initialize import FreshWeights
    from megalite.parallel.axes import connect
    from megalite.parallel.mesh import Mesh

    small = _small(config, model, num_steps)
    plan = make_plan(small, 1)
    source = FreshWeights(plan.model, config.run.seed)
    engine = build_engine(small, plan, connect(Mesh(), 0), torch.device("cpu"), source)
    batch = _random_batch(plan.model.vocab_size, config.run.seed)
    before = _outputs(engine.stage, batch)
    for _ in range(num_steps):
        engine.train_step([batch], lr)
    after = _outputs(engine.stage, batch)
    engine.close()
    changes = {layer: (after[layer] - output).abs().mean().item() for layer, output in before.items()}
    for layer, change in changes.items():
        if not (math.isfinite(change) and change > 0.0):
            raise UserError(
                f"at width {model.hidden_size}, the output of {layer} moved by {change:g} in {num_steps} steps at rate "
                f"{lr:g}; use another --lr, and optimizer.lr_scales that let every layer learn"
            )
    return changes


@torch.no_grad()
def _outputs(stage: Stage, batch: Batch) -> dict[str, Tensor]:
    """What each kind of layer puts out: of the first block and the last, and the logits."""
    found: dict[str, Tensor] = {}
    assert stage.embedding is not None, "a whole model"
    blocks = stage.blocks_by_index()
    layers: dict[str, nn.Module] = {"embedding": stage.embedding}
    for index in dict.fromkeys((min(blocks), max(blocks))):
        block = blocks[index]
        layers |= {f"attention {index}": block.attention, f"mlp {index}": block.mlp}
    handles = [layer.register_forward_hook(_keep_output(found, name)) for name, layer in layers.items()]
    found["logits"] = stage.eval().logits(batch.tokens, documents_of_batch(batch))
    for handle in handles:
        handle.remove()
    return {name: found[name] for name in (*layers, "logits")}


def _keep_output(found: dict[str, Tensor], name: str) -> Any:
    def keep(module: nn.Module, inputs: Any, output: Tensor) -> None:
        found[name] = output.clone()

    return keep


def _random_batch(vocab_size: int, seed: int) -> Batch:
    """Random tokens, a document a sequence; every label counts."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab_size, (SEQUENCES, SEQ_LEN), generator=generator)
    size = SEQUENCES * SEQ_LEN
    return Batch(
        tokens=tokens.flatten(),
        labels=tokens.roll(-1, dims=1).flatten(),
        loss_mask=torch.ones(size, dtype=torch.bool),
        positions=torch.arange(SEQ_LEN).repeat(SEQUENCES),
        cu_seqlens=torch.arange(0, size + 1, SEQ_LEN, dtype=torch.int32),
        max_seqlen=SEQ_LEN,
        keys=torch.arange(size),
    )


@contextmanager
def _one_rank() -> Iterator[None]:
    """A world of this process alone."""
    from megalite.engine.runtime import connect_processes, disconnect_processes

    with tempfile.TemporaryDirectory(prefix="megalite-") as folder:
        connect_processes(rank=0, world_size=1, device_type="cpu", init_method=f"file://{folder}/rendezvous")
        try:
            yield
        finally:
            disconnect_processes()


def _slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Least squares."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - mean_x) ** 2 for a in x)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
