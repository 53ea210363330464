"""What must hold where a GPU repeats micro-batches from a record: nothing in them may ask the host, or change there."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.architecture.architecture import Architecture
from megalite.config.engine import choose_engine
from megalite.config.schema import Config


def check_graphs(config: Config, model: Architecture) -> Iterator[str]:
    """Complaints about `train.cuda_graphs`."""
    if not config.train.cuda_graphs:
        return
    for found, instead in (*_of_layout(config), *_of_numbers(config), *_of_attention(config, model)):
        yield f"train.cuda_graphs: {found}; use {instead}, or false"


Conflict = tuple[str, str]
"""What was found, and what to set instead."""


def _of_layout(config: Config) -> Iterator[Conflict]:
    parallel, train = config.parallel, config.train
    if train.device == "cpu":
        yield "it is for GPUs, and train.device=cpu", "train.device=auto"
    if (engine := choose_engine(config)) != "native":
        yield f"engine={engine} has passes of its own", "engine=native with zero_stage=0 or 1"
    if parallel.pp > 1:
        yield f"pp={parallel.pp} sends between passes, by an order that the host goes through", "pp=1"
    if parallel.cp > 1:
        yield f"cp={parallel.cp} cuts each micro-batch as its documents lie, on the host", "cp=1"
    if parallel.ep > 1:
        yield f"ep={parallel.ep} asks for each block how many rows travel", "ep=1"
    if parallel.async_tp:
        yield "the products of parallel.async_tp were never recorded", "async_tp=false"
    if train.offload_activations:
        yield "train.offload_activations copies by a stream of its own, when it has room", "offload_activations=false"
    if train.preference is not None:
        yield "train.preference asks a second model beside each micro-batch", "preference=null"
    if train.loss is not None:
        yield (
            f"the loss {train.loss.name} is a plug-in's, and may take numbers from the host or remember some",
            "loss=null",
        )
    if train.components:
        yield "a component of a plug-in may change between steps what was recorded", "components={}"


def _of_numbers(config: Config) -> Iterator[Conflict]:
    precision = config.precision
    if precision.dtype == "fp32":
        yield "in fp32 attention goes from document to document, on the host", "precision.dtype=bf16"
    elif precision.dtype != "bf16" and config.model.moe is not None:
        yield "products of experts are made in groups in bf16 alone, and one by one else", "precision.dtype=bf16"
    for name in ("fp8", "fp4", "qat"):
        if getattr(precision, name) is not None:
            yield f"layers of precision.{name} change their way between micro-batches", f"{name}=null"


def _of_attention(config: Config, model: Architecture) -> Iterator[Conflict]:
    """Attention that is spelled out walks from document to document."""
    attentions = [block.attention for block in model.blocks]
    if config.model.attention_dropout:
        yield f"attention_dropout={config.model.attention_dropout:g} is computed by document", "attention_dropout=0"
    if any(each.sinks for each in attentions):
        yield "attention with sinks is computed by document", "model.attention_sinks=false"
    if any(each.soft_cap is not None for each in attentions):
        yield "bounded scores of attention are computed by document", "model.attention_soft_cap=null"
