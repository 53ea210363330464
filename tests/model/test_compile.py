"""Compiled blocks compute what eager ones do, under every kind of recomputation."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.layers.documents import Documents
from megalite.parallel.axes import SINGLE
from tests.kit.spawn import run_ranks
from tests.layers.parity import difference
from tests.model.stages import gradients, make_batch, make_stage, run_stage, tensor_axis, tiny_model

TOLERANCE = 1e-5
"""fp32, relative to the largest entry where that exceeds 1: fused kernels add up in another order."""

SETTINGS = {"num_kv_heads": 2, "qk_norm": True, "dropout": 0.1}


def train_stage(compiled: bool, batches: int, **spec: Any) -> tuple[dict[str, Tensor], int]:
    """Loss and gradients over some micro-batches, and the bytes that the last one saved for its backward pass."""
    stage = make_stage(tiny_model(**SETTINGS), dtype=torch.float32, **spec)
    if compiled:
        stage.compile_blocks()
    saved: dict[int, int] = {}

    def remember(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    for number in range(batches):
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
            loss = run_stage(stage, make_batch(first=2 * number))
        loss.backward()
    return {"loss": loss.detach(), **gradients(stage)}, sum(saved.values())


def compare_compiled(folder: str, kinds: tuple[str, ...]) -> tuple[list[str], dict[str, int]]:
    """Tensors that differ from the eager ones, and the bytes saved under each kind of recomputation."""
    from torch._inductor import config

    config.compile_threads = 1  # no pool of workers
    tp = tensor_axis() if dist.get_world_size() > 1 else SINGLE
    torch._dynamo.config.error_on_recompile = tp.size == 1  # others are compiled a layer at a time, of several shapes
    wrong, saved = [], {}
    with torch._inductor.utils.fresh_cache(dir=folder):
        for kind in kinds:
            spec = {"tp": tp, "sequence_parallel": tp.size > 1, "recompute": kind}
            eager, saved[f"{kind}, eager"] = train_stage(False, 2, **spec)
            found, saved[kind] = train_stage(True, 2, **spec)
            bad = {key: difference(found[key], eager[key]) for key in eager}
            wrong += [f"{kind}, rank {tp.rank}: {key} {error:.1e}" for key, error in bad.items() if error > TOLERANCE]
    return wrong, saved


def test_compiled_blocks_equal_eager_ones(tmp_path):
    """Loss and all gradients of two accumulated micro-batches are those of eager blocks for every kind of
    recomputation, with dropout on; the second block and batch find the graphs of the first. The compiler redoes by
    itself what selective recomputation does, whatever was asked for; full recomputation saves less than that."""
    ((wrong, saved),) = run_ranks(compare_compiled, 1, str(tmp_path), ("none", "selective", "full"))
    assert not wrong, "\n".join(wrong)
    assert saved["full"] < saved["selective"] == saved["none"] < 0.75 * saved["none, eager"], saved


def test_compiled_blocks_with_collectives(tmp_path):
    """The same for tp 2 with sequence parallelism."""
    for wrong, _ in run_ranks(compare_compiled, 2, str(tmp_path), ("selective",)):
        assert not wrong, "\n".join(wrong)


def attend_plainly(q: Tensor, k: Tensor, v: Tensor, documents: Documents, window: int | None) -> Tensor:
    """Attention that the compiler can look into, as it does into GPUs' kernels: one document, no window."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[2] ** 0.5
    later = torch.ones(q.shape[0], q.shape[0], dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, float("-inf")).softmax(-1), v)


def count_graphs(folder: str) -> list[tuple[int, int]]:
    """Graphs and breaks of the blocks of a stage at tp 2, without and with sequence parallelism."""
    from torch._inductor import config

    config.compile_threads = 1
    found = []
    for sequence_parallel in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        spec = {"tp": tensor_axis(), "sequence_parallel": sequence_parallel, "recompute": "none"}
        stage = make_stage(tiny_model(**SETTINGS), dtype=torch.float32, **spec)
        for block in stage.blocks.values():
            block.attention.attend = attend_plainly
        stage.compile_blocks()
        with torch._inductor.utils.fresh_cache(dir=folder):
            run_stage(stage, make_batch()).backward()
        counters = torch._dynamo.utils.counters
        found.append((counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())))
    return found


def test_a_block_is_one_graph(tmp_path):
    """With its collectives, and all blocks share it."""
    assert run_ranks(count_graphs, 2, str(tmp_path)) == [[(1, 0), (1, 0)]] * 2
