"""Adapters train like plain PyTorch's in every layout, and what is frozen costs no gradient and no master."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.test_layouts import FEWER_STEPS, compare, layout
from tests.kit.spawn import run_ranks
from tests.kit.train import start_rank, tiny_config

FEW = {"batch": {"micro_batch_size": 4}}
SOME = {"lora": {"rank": 3, "alpha": 6, "targets": ["q", "v", "down"]}, "num_layers": 2}
ALL = {"lora": {"rank": 4, "alpha": 20}, "num_layers": 2, "tie_embeddings": True}
SHARED_HEADS = {**SOME, "num_kv_heads": 1}


def case(model: dict[str, Any], **parallel: Any) -> dict[str, Any]:
    train = parallel.pop("train", {})
    return layout(**parallel, more={"model": model, "train": train, **FEW})


CASES = {
    1: [
        case(ALL, zero_stage=0),
        case(SOME, train={"recompute": "selective"}),
        case(SOME, train={"mlp_chunk_tokens": 7, "recompute": "full"}),
    ],
    2: [
        case(SOME, dp=2),
        case(ALL, dp=2, zero_stage=3, engine="deepspeed"),
        case(SOME, dp=2, zero_stage=3, engine="fsdp2"),
        case(ALL, tp=2),
        case(SHARED_HEADS, tp=2, sequence_parallel=True),
        case(ALL, pp=2),
        case(ALL, cp=2),
        case(SOME, pp=2, schedule="zb-h1"),
        case(ALL, pp=2, blocks_per_stage=[2, 0]),
    ],
    4: [case(SOME, tp=2, dp=2, sequence_parallel=True), case(ALL, pp=2, dp=2)],
}


@pytest.mark.parametrize("world_size", CASES)
def test_layouts_equal_plain_pytorch(world_size):
    """Loss to 1e-5 and norm to 1e-4, step by step: against transformers' Llama with `W + scale B A` in place of W."""
    compare(CASES[world_size], world_size, FEWER_STEPS)


BF16 = {"precision": {"dtype": "bf16"}, "model": SOME, "batch": {"micro_batch_size": 2}}


def gone_on(folder: Path, parallel: dict[str, Any]) -> list[Any]:
    """Train, stop and go on in a layout; how many numbers its adapters have, and the engine that was not stopped."""
    config = tiny_config(**BF16, parallel={"dp": 2, **parallel})
    whole = start_rank(config)
    before = {each.local.weight.name: each.tensors["weight"].clone() for each in whole.engine.local_weights()}
    curve = whole.train(0, 3)
    checkpoint = whole.save(folder, 3)
    curve += whole.train(3, 6)
    moved = [
        each.local.weight.name
        for each in whole.engine.local_weights()
        if not torch.equal(each.tensors["weight"], before[each.local.weight.name])
    ]
    again = start_rank(config, checkpoint).train(3, 6)
    assert again == curve[3:]
    assert moved
    assert all(name.endswith((".lora_a", ".lora_b")) for name in moved)
    parameters = sum(each.numel() for name, each in whole.engine.stage.named_parameters() if ".lora." in name)
    return [parameters, whole.engine]


def native(folder: Path) -> None:
    """Sums of gradients and masters are of adapters alone."""
    parameters, engine = gone_on(folder, {"zero_stage": 1})
    (bucket,) = engine._buckets
    assert parameters <= bucket.sums.numel() < parameters + 128
    assert bucket.master.numel() == bucket.sums.numel() // 2


def fsdp2(folder: Path) -> None:
    """What the optimizer is given is of adapters alone."""
    _, engine = gone_on(folder, {"zero_stage": 3, "engine": "fsdp2"})
    adapters = [name for name, _ in engine.stage.named_parameters() if ".lora." in name]
    assert len(engine._update._buckets) == len(adapters) > 0


@pytest.mark.parametrize("check", [native, fsdp2])
def test_frozen_weights_cost_nothing_and_restarts_are_exact(tmp_path, check):
    """In bf16 on two replicas: no weight but adapters moves, and a run that was stopped goes on bit by bit."""
    run_ranks(check, 2, tmp_path)
