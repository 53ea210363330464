"""Memory that is planned for GPUs, against what runs on them have taken."""

from __future__ import annotations

import pytest

from megalite.planner.block_memory import block_activations, recomputed
from megalite.planner.memory import memory_by_stage
from tests.planner.test_memory import planned


def test_a_record_keeps_a_pass_of_its_own():
    """With `train.cuda_graphs`: what blocks and head keep once more, and the larger of logits and a block at work."""
    plain, recorded = (
        memory_by_stage(*planned(train={"steps": 1, "device": "cuda", "cuda_graphs": is_recorded}))[0]
        for is_recorded in (False, True)
    )
    added = recorded.buffers - plain.buffers
    assert plain.activations < added <= plain.activations + plain.head
    assert recorded.total - plain.total == added


def test_shared_memory_is_two_pieces_of_the_stream():
    """What torch's ops copy through, for `parallel.async_tp`: twice a rank's rows."""
    tp = {"tp": 2, "sequence_parallel": True}
    before, after = (
        memory_by_stage(*planned(2, parallel={**tp, "async_tp": is_async}, train={"device": "cuda"}))[0].buffers
        for is_async in (False, True)
    )
    config, _ = planned(2, parallel=tp)
    rows = config.batch.micro_batch_size * config.batch.seq_len // 2
    assert after - before == 2 * 2 * rows * config.model.hidden_size  # bf16


ON_H200 = {
    "1.3B": ((2048, 24, 16, 5632), (2048, 16), {}, 57.91),
    "1.3B, FP8": ((2048, 24, 16, 5632), (2048, 16), {"precision": {"fp8": {"backend": "te"}}}, 68.87),
    "1.3B, offloaded": ((2048, 24, 16, 5632), (2048, 16), {"optimizer": {"offload": True}}, 43.39),
    "1.3B, rounded": ((2048, 24, 16, 5632), (2048, 16), {"precision": {"qat": {"bits": 4, "group_size": 32}}}, 60.2),
    "125M": ((768, 12, 12, 2048), (2048, 32), {}, 15.84),
    "3B": ((2560, 32, 20, 8704), (2048, 8), {}, 84.84),
    "8B with 20 layers": ((4096, 20, 32, 14336), (4096, 2), {}, 101.04),
}
"""Sizes, tokens, settings, and GiB at the peak of a compiled step: docs/benchmarks/2026-11-27-gpu-h200-kernels.json."""


@pytest.mark.parametrize("name", ON_H200)
def test_a_gpu_takes_what_is_planned(name: str):
    (hidden, layers, heads, ffn), (seq_len, sequences), settings, measured = ON_H200[name]
    config, plan = planned(
        model={"hidden_size": hidden, "num_layers": layers, "num_heads": heads, "ffn_hidden_size": ffn}
        | {"vocab_size": 32000, "tie_embeddings": True},
        batch={"seq_len": seq_len, "micro_batch_size": sequences, "global_batch_size": sequences},
        train={"steps": 1, "compile": "on", "device": "cuda"},
        **settings,
    )
    assert memory_by_stage(config, plan)[0].total / 2**30 == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize(
    ("model", "streams"),
    [
        ({}, 1),
        ({"parallel_residual": True}, 2),
        ({"norm_placement": "after"}, 0),
        ({"moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 64}}, 0),
    ],
    ids=str,
)
def test_what_is_added_to_the_stream_is_not_kept(model: dict, streams: int):
    """By a graph on a GPU: results of a block's last product, and of parallel blocks attention's; a norm asks for what
    it is given, and experts' results are weighed."""
    config, plan = planned(model=model, train={"steps": 1, "compile": "on", "device": "cuda"})
    (one,), (other,) = (block_activations(config, plan, [1], mode) for mode in ("selective", "compiled"))
    assert one - other == 2 * streams * config.model.hidden_size


def test_who_keeps_it_all_the_same():
    """Blocks on a CPU, and those whose products are a library's."""
    for device, precision in (("cpu", {}), ("cuda", {"fp8": {"backend": "te"}})):
        config, plan = planned(train={"steps": 1, "compile": "on", "device": device}, precision=precision)
        assert set(recomputed(config, plan)) == {"selective"}
    config, plan = planned(train={"steps": 1, "compile": "on", "device": "cuda"})
    assert set(recomputed(config, plan)) == {"compiled"}
