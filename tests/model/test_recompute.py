"""Recomputation changes memory, not gradients."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist

from megalite.parallel.axes import SINGLE
from tests.kit.spawn import run_ranks
from tests.layers.tracking import LivingStorages
from tests.model.stages import GPT_STYLE, SEQ_LEN, gradients, make_batch, make_stage, run_stage, tensor_axis, tiny_model

KINDS = ("none", "selective", "full")

MODELS = {
    "llama": {"dropout": 0.1},
    "grouped-query": {"num_kv_heads": 2, "qk_norm": True, "dropout": 0.1},
    "sliding window": {"sliding_window": 3},
    "gpt": GPT_STYLE,
}


def compare_kinds() -> list[str]:
    """Every gradient that is not bit-equal to that without recomputation, on this rank."""
    tp = tensor_axis() if dist.get_world_size() > 1 else SINGLE
    wrong = []
    for name, settings in MODELS.items():
        for sequence_parallel in (False, True) if tp.size > 1 else (False,):
            results = {}
            for kind in KINDS:
                options = {"recompute": kind, "sequence_parallel": sequence_parallel}
                stage = make_stage(tiny_model(**settings), tp=tp, dtype=torch.float32, **options)
                for first in (0, 2):  # two micro-batches accumulate
                    loss = run_stage(stage, make_batch(first))
                    loss.backward()
                results[kind] = {"loss": loss.detach(), **gradients(stage)}
            for kind in KINDS[1:]:
                moved = [key for key, value in results[kind].items() if not torch.equal(value, results["none"][key])]
                if moved:
                    wrong.append(f"{name}, {kind}, sequence_parallel={sequence_parallel}, rank {tp.rank}: {moved}")
    return wrong


@pytest.mark.parametrize("tp", [1, 2])
def test_gradients_are_bit_equal(tp):
    """Loss and all gradients are bit-equal under none, selective and full recomputation, over two accumulated
    micro-batches, with dropout, at tp 1 and 2, with and without sequence parallelism."""
    wrong = [line for lines in run_ranks(compare_kinds, tp) for line in lines]
    assert not wrong, "\n".join(wrong)


def bytes_kept(kind: str, num_layers: int) -> int:
    """Bytes alive between the forward and the backward pass."""
    model = tiny_model(num_layers=num_layers, hidden_size=64, ffn_hidden_size=192)
    stage = make_stage(model, dtype=torch.float32, recompute=kind)
    batch = make_batch(count=8)
    with LivingStorages() as storages:
        loss = run_stage(stage, batch)
        gc.collect()
        kept = storages.num_bytes()
    del loss
    return kept


def test_recomputation_saves_memory():
    """What one more block keeps alive for the backward pass: under full recomputation nothing but its input, under
    selective less than six tenths of everything."""
    per_block = {kind: bytes_kept(kind, 4) - bytes_kept(kind, 3) for kind in KINDS}
    stream = 8 * SEQ_LEN * 64 * 4
    assert per_block["full"] == stream, per_block
    assert per_block["full"] < per_block["selective"] < 0.6 * per_block["none"], per_block
