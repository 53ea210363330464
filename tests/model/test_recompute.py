"""Recomputation changes memory, not gradients."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from megalite.layers.weight_gradients import TakeGradient
from megalite.model.offload import HostStore, Kept
from megalite.parallel.axes import SINGLE
from tests.kit.spawn import run_ranks
from tests.layers.tracking import LivingStorages
from tests.model.stages import (
    GPT_STYLE,
    LATENTS,
    SEQ_LEN,
    gradients,
    make_batch,
    make_stage,
    run_stage,
    tensor_axis,
    tiny_model,
)

KINDS = ("none", "selective", "full")
MIXED = (("full", "none"), ("selective", "full"))
"""Of two blocks."""

MODELS = {
    "llama": {"dropout": 0.1},
    "grouped-query": {"num_kv_heads": 2, "qk_norm": True, "dropout": 0.1},
    "sliding window": {"sliding_window": 3},
    "gpt": GPT_STYLE,
    "latents": LATENTS,
    "sinks": {"attention_sinks": True, "num_kv_heads": 2, "sliding_window": 3},
}


def results_of(kinds: dict[str, dict], dtype: torch.dtype) -> Iterator[tuple[str, dict[str, dict[str, torch.Tensor]]]]:
    """Loss and gradients on this rank after two micro-batches, by kind of stage, for each model and layout."""
    tp = tensor_axis() if dist.get_world_size() > 1 else SINGLE
    for name, settings in MODELS.items():
        for sequence_parallel in (False, True) if tp.size > 1 else (False,):
            results = {}
            for kind, options in kinds.items():
                options = {"tp": tp, "dtype": dtype, "sequence_parallel": sequence_parallel, **options}
                stage = make_stage(tiny_model(**settings), **options)
                for first in (0, 2):  # two micro-batches accumulate
                    loss = run_stage(stage, make_batch(first))
                    loss.backward()
                results[kind] = {"loss": loss.detach(), **gradients(stage)}
            yield f"{name}, sequence_parallel={sequence_parallel}, rank {tp.rank}", results


def compare_kinds() -> list[str]:
    """Every gradient that is not bit-equal to that without recomputation, on this rank."""
    kinds = {kind: {"recompute": kind} for kind in (*KINDS, *MIXED)}
    return [
        f"{where}, {kind}: {key}"
        for where, results in results_of(kinds, torch.float32)
        for kind in (*KINDS[1:], *MIXED)
        for key, value in results[kind].items()
        if not torch.equal(value, results["none"][key])
    ]


@pytest.mark.parametrize("tp", [1, 2])
def test_gradients_are_bit_equal(tp):
    """Loss and all gradients are bit-equal under none, selective and full recomputation, and one block's unlike the
    other's, over two accumulated micro-batches, with dropout, at tp 1 and 2, with and without sequence parallelism."""
    wrong = [line for lines in run_ranks(compare_kinds, tp) for line in lines]
    assert not wrong, "\n".join(wrong)


SAVING = {
    "chunks": {"mlp_chunk_tokens": 7},
    "chunks, full": {"mlp_chunk_tokens": 5, "recompute": "full"},
    "offload": {"recompute": "full", "offload": True},
    "both": {"mlp_chunk_tokens": 16, "recompute": "full", "offload": True},
}
"""7 and 5 tokens leave a smaller chunk at the end."""


def compare_savings() -> list[str]:
    """Every gradient that is not that of a stage which saves nothing, on this rank: chunks add up in another order."""
    return [
        f"{where}, {kind}: {key}"
        for where, results in results_of({"none": {}, **SAVING}, torch.float64)
        for kind in SAVING
        for key, want in results["none"].items()
        if not (results[kind][key] - want).abs().max() <= 1e-12 * want.abs().max() + 1e-14
    ]


@pytest.mark.parametrize("tp", [1, 2])
def test_savings_change_no_gradient(tp):
    """MLPs in chunks, inputs that wait elsewhere, and both, in float64, with dropout, over two micro-batches."""
    wrong = [line for lines in run_ranks(compare_savings, tp) for line in lines]
    assert not wrong, "\n".join(wrong)


def bytes_kept(kind: str | tuple[str, ...], num_layers: int, **spec: Any) -> int:
    """Bytes alive between the forward and the backward pass."""
    model = tiny_model(num_layers=num_layers, hidden_size=64, ffn_hidden_size=192)
    stage = make_stage(model, dtype=torch.float32, recompute=kind, **spec)
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


def test_an_input_that_waits_elsewhere_is_not_kept_here(monkeypatch):
    """Of a block nothing is alive but the copy, here in the same memory."""
    monkeypatch.setattr(HostStore, "put", lambda store, x: Kept(x.clone(), None, None))
    per_block = bytes_kept("full", 4, offload=True) - bytes_kept("full", 3, offload=True)
    assert per_block == 8 * SEQ_LEN * 64 * 4


def test_blocks_differ():
    """What each block keeps is its own kind's, whatever the others have: a stage keeps their sum."""
    per_block = {kind: bytes_kept(kind, 4) - bytes_kept(kind, 3) for kind in KINDS}
    mixed = ("full", "none", "selective", "full")
    wanted = bytes_kept("full", 3) - 3 * per_block["full"] + sum(per_block[kind] for kind in mixed)
    assert bytes_kept(mixed, 4) == wanted


def flops(take: TakeGradient | None, **spec: Any) -> int:
    """Of products, in a forward and a backward pass."""
    stage = make_stage(tiny_model(), dtype=torch.float32, take_gradient=take, **spec)
    with FlopCounterMode(display=False) as counted:
        run_stage(stage, make_batch()).backward()
    return counted.get_total_flops()


@pytest.mark.parametrize("spec", [{"recompute": "full"}, {"mlp_chunk_tokens": 7}, {"recompute": "selective"}, {}])
def test_gradients_that_somebody_else_keeps_take_no_more_products(spec: dict[str, Any]):
    """Recomputation ends before a block's last product, as it does with torch's own: the next pass does not need it."""
    assert flops(lambda parameter, made: made.make(), **spec) == flops(None, **spec)


def test_an_input_that_needs_no_gradient_waits_elsewhere_too():
    """As behind an embedding that is frozen: the second pass is the first one's."""
    found = []
    for offload in (False, True):
        stage = make_stage(tiny_model(tie_embeddings=False), dtype=torch.float32, recompute="full", offload=offload)
        stage.embedding.weight.requires_grad_(False)
        run_stage(stage, make_batch()).backward()
        found.append({name: each.grad for name, each in stage.named_parameters() if each.requires_grad})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_an_input_that_waits_elsewhere_takes_no_more_products():
    """Its second pass ends where that of full recomputation does."""
    assert flops(None, recompute="full", offload=True) == flops(None, recompute="full")
