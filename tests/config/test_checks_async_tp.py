"""What is said of products that send through memory that GPUs share."""

from __future__ import annotations

import pytest

from megalite.config.checks_async_tp import check_async_tp
from megalite.config.schema import Config

TP = {"tp": 2, "sequence_parallel": True, "async_tp": True}

REFUSED = {
    "no tensor parallelism": (
        {"parallel": {**TP, "tp": 1}},
        "parallel.async_tp: found with tp=1, and it sends what sequence parallelism gathers and sums over tp; use tp=2 "
        "or more with sequence_parallel=true, or false",
    ),
    "a whole stream on each rank": (
        {"parallel": {**TP, "sequence_parallel": False}},
        "parallel.async_tp: found with sequence_parallel=false, and it sends what sequence parallelism gathers and "
        "sums over tp; use tp=2 or more with sequence_parallel=true, or false",
    ),
    "no GPUs": (
        {"train": {"steps": 1, "device": "cpu"}},
        "parallel.async_tp: needs GPUs that share memory, and train.device=cpu; use false",
    ),
    "an engine with gradients of its own": (
        {"parallel": {**TP, "engine": "fsdp2", "zero_stage": 3}},
        "parallel.async_tp: engine=fsdp2 makes gradients of weights by itself, beside which messages would travel; use "
        "engine=native with zero_stage=0 or 1, or false",
    ),
    "FP8": (
        {"precision": {"dtype": "bf16", "fp8": {"backend": "te"}}},
        "parallel.async_tp: precision.fp8 multiplies by itself; use fp8=null, or async_tp=false",
    ),
    "rounded weights": (
        {"precision": {"qat": {"bits": 4}}},
        "parallel.async_tp: precision.qat multiplies by itself; use qat=null, or async_tp=false",
    ),
    "adapters": (
        {"model": {"vocab_size": 64, "lora": {"rank": 2}}},
        "parallel.async_tp: products with adapters are made in parts; use model.lora=null, or async_tp=false",
    ),
}


def config(**sections: dict) -> Config:
    return Config(**{"train": {"steps": 1}, "model": {"vocab_size": 64}, "parallel": TP, **sections})


@pytest.mark.parametrize(("sections", "said"), REFUSED.values(), ids=REFUSED)
def test_refused(sections: dict, said: str):
    assert list(check_async_tp(config(**sections))) == [said]


@pytest.mark.parametrize("sections", [{}, {"parallel": {"tp": 2, "sequence_parallel": True}}, {"parallel": {}}])
def test_fine(sections: dict):
    assert not list(check_async_tp(config(**sections)))
