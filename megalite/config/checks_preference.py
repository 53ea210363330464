"""What must hold between `train.preference` and the rest of a config."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.architecture.architecture import Architecture
from megalite.config.checks_optimizer import trained_beside_adapters
from megalite.config.engine import choose_engine
from megalite.config.schema import Config

KEY = "train.preference"


def check_preference(config: Config, model: Architecture) -> Iterator[str]:
    """Complaints about learning from pairs of answers.

    Args:
        model: filled.
    """
    if config.train.preference is None:
        return
    yield from _reference(config, model)
    yield from _weights(config, model)
    if config.model.dropout or config.model.attention_dropout:
        yield f"{KEY}: margins are measured without dropout, and gradients would be made with it; use model.dropout=0"
    if config.health.spikes is not None:
        yield f"{KEY}: spikes are found by the cross-entropy's loss, which is another here; use health.spikes=null"
    if config.train.loss is not None:
        yield f"{KEY}: train.loss is of tokens by themselves; use null for one of the two"
    if not config.data.document_masks:
        yield f"{KEY}: a rejected answer would see the chosen one before it; use data.document_masks=true"


def _reference(config: Config, model: Architecture) -> Iterator[str]:
    """Of the frozen model."""
    if config.train.branch_from is not None:
        yield (
            f"{KEY}: a branch goes on from weights that are not the reference; use train.branch_from=null, and begin a "
            "new run from a model: train.init_from"
        )
    elif config.train.init_from is None:
        yield (
            f"{KEY}: the reference is the model that the run begins with, and without train.init_from that knows "
            "nothing; name a model that was trained on answers"
        )
    if choose_engine(config) == "deepspeed" and config.model.lora is None:
        yield (
            f"{KEY}: engine=deepspeed cannot hold the reference beside the model; use zero_stage=0 or 1 with "
            "engine=native, engine=fsdp2, or model.lora, whose reference is the model without adapters"
        )
    moving = [] if model.lora is None else trained_beside_adapters(config.optimizer, model)
    if moving:
        yield (
            f"{KEY}: with model.lora the reference is the model without adapters, and optimizer.groups trains "
            f"{moving[0]} of it; freeze it, or use lora=null"
        )
    if config.batch.stages:
        yield f"{KEY}: batch.stages: the reference would change with the stages' lengths; use one length"
    if config.precision.gather_bits is not None and choose_engine(config) == "native" and model.lora is None:
        yield f"{KEY}: precision.gather_bits: the model's weights are rounded, the reference's are not; use null"


def _weights(config: Config, model: Architecture) -> Iterator[str]:
    """Of what weighs tokens as the loss does, whose weights are negative in rejected answers."""
    others = {
        "model.moe": (model.moe is not None, "routers balance tokens", "null"),
        "model.mtp": (model.mtp is not None, "layers that predict further learn tokens", "null"),
        "model.z_loss": (bool(model.z_loss), "it is of tokens", "0"),
        "batch.noise_scale": (config.batch.noise_scale is not None, "it is measured of tokens", "null"),
    }
    for key, (is_set, what, otherwise) in others.items():
        if is_set:
            yield f"{KEY}: {key}: {what} by their weights, negative ones in rejected answers; use {key}={otherwise}"
    for key in ("fp8", "fp4", "qat"):
        if getattr(config.precision, key) is not None:
            yield f"{KEY}: precision.{key}: the reference would be rounded with the model's own history; use {key}=null"
