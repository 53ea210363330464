"""What is said of micro-batches that a GPU is to repeat from a record."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megalite.config.checks_graphs import check_graphs
from megalite.config.fill import fill
from megalite.config.schema import Config

TRAIN = {"steps": 1, "cuda_graphs": True}
MODEL = {"vocab_size": 64, "hidden_size": 64, "num_heads": 4}
EXPERTS = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 32}

REFUSED = {
    "no GPU": ({"train": {**TRAIN, "device": "cpu"}}, "it is for GPUs, and train.device=cpu; use train.device=auto"),
    "another engine": (
        {"parallel": {"zero_stage": 3}},
        "engine=fsdp2 has passes of its own; use engine=native with zero_stage=0 or 1",
    ),
    "DeepSpeed": (
        {"parallel": {"engine": "deepspeed"}},
        "engine=deepspeed has passes of its own; use engine=native with zero_stage=0 or 1",
    ),
    "a pipeline": (
        {"parallel": {"pp": 2}},
        "pp=2 sends between passes, by an order that the host goes through; use pp=1",
    ),
    "context parallelism": (
        {"parallel": {"cp": 2}},
        "cp=2 cuts each micro-batch as its documents lie, on the host; use cp=1",
    ),
    "experts over ranks": (
        {"parallel": {"ep": 2, "dp": 2}, "model": {**MODEL, "moe": EXPERTS}},
        "ep=2 asks for each block how many rows travel; use ep=1",
    ),
    "shared memory": (
        {"parallel": {"tp": 2, "sequence_parallel": True, "async_tp": True}},
        "the products of parallel.async_tp were never recorded; use async_tp=false",
    ),
    "activations in the host's memory": (
        {"train": {**TRAIN, "recompute": "full", "offload_activations": True}},
        "train.offload_activations copies by a stream of its own, when it has room; use offload_activations=false",
    ),
    "pairs of answers": (
        {"train": {**TRAIN, "preference": {}}},
        "train.preference asks a second model beside each micro-batch; use preference=null",
    ),
    "fp32": (
        {"precision": {"dtype": "fp32"}},
        "in fp32 attention goes from document to document, on the host; use precision.dtype=bf16",
    ),
    "experts in fp16": (
        {"precision": {"dtype": "fp16"}, "model": {**MODEL, "moe": EXPERTS}},
        "products of experts are made in groups in bf16 alone, and one by one else; use precision.dtype=bf16",
    ),
    "FP8": (
        {"precision": {"dtype": "bf16", "fp8": {"backend": "scaled_mm"}}},
        "layers of precision.fp8 change their way between micro-batches; use fp8=null",
    ),
    "rounded weights": (
        {"precision": {"dtype": "bf16", "qat": {"bits": 4}}},
        "layers of precision.qat change their way between micro-batches; use qat=null",
    ),
    "dropped weights of attention": (
        {"model": {**MODEL, "attention_dropout": 0.1}},
        "attention_dropout=0.1 is computed by document; use attention_dropout=0",
    ),
    "sinks": (
        {"model": {**MODEL, "attention_sinks": True}},
        "attention with sinks is computed by document; use model.attention_sinks=false",
    ),
    "bounded scores": (
        {"model": {**MODEL, "attention_soft_cap": 50.0}},
        "bounded scores of attention are computed by document; use model.attention_soft_cap=null",
    ),
}


def config(**sections: dict) -> Config:
    return Config(**{"train": TRAIN, "model": MODEL, "precision": {"dtype": "bf16"}, **sections})


def said(given: Config) -> list[str]:
    return list(check_graphs(given, fill(given, 64)))


@pytest.mark.parametrize(("sections", "why"), REFUSED.values(), ids=REFUSED)
def test_refused(sections: dict, why: str):
    assert said(config(**sections)) == [f"train.cuda_graphs: {why}, or false"]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (
            {"loss": SimpleNamespace(name="mine")},
            "the loss mine is a plug-in's, and may take numbers from the host or remember some; use loss=null",
        ),
        (
            {"components": {"mine": {}}},
            "a component of a plug-in may change between steps what was recorded; use components={}",
        ),
    ],
)
def test_plug_ins_that_may_change_a_pass(settings: dict, why: str):
    given = config()
    assert said(given.model_copy(update={"train": given.train.model_copy(update=settings)})) == [
        f"train.cuda_graphs: {why}, or false"
    ]


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"parallel": {"tp": 2, "dp": 2, "sequence_parallel": True}},
        {"parallel": {"zero_stage": 0}},
        {"model": {**MODEL, "moe": EXPERTS}},
        {"model": {**MODEL, "lora": {"rank": 2}}},
        {"precision": {"dtype": "fp16"}},
        {"train": {"steps": 1}, "precision": {"dtype": "fp32"}, "parallel": {"pp": 2}},
    ],
)
def test_fine(sections: dict):
    assert not said(config(**sections))
