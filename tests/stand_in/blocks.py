"""Blocks compiled for a device that is none: how many graphs they take, and what of them is multiplied again.

Asked by `test_blocks`; the question is the library of the device. The compiler's own front and its cut into a forward
and a backward pass are real; its kernels, which need Triton and a GPU, are torch's eager ones.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.kit.graphs import make_no_kernels
from tests.stand_in.cuda import pretend

NUM_LAYERS, SEQ_LEN = 2, 64

BATCHES = ((64,), (10, 54), (3, 1, 60), (20, 20, 24))
"""Lengths of documents: another number of short ones must not have a block compiled anew."""

KINDS = ("none", "selective", "full")

FORMATS = ("bf16", "current", "delayed", "rowwise")


def main(library: str) -> dict[str, Any]:
    """Try every format and every recomputation."""
    device = pretend(Path(library))
    import torch

    torch.set_num_threads(1)
    graphs = make_no_kernels()
    answer = {
        "compiled": {name: _compare(name, graphs) for name in FORMATS},
        "products": {f"{name} {kind}": _products(name, kind) for name in ("bf16", "current") for kind in KINDS},
    }
    del device
    return answer


def _make(name: str, recompute: str = "none") -> Any:
    import torch

    from megalite.config.schema import Fp8Config
    from megalite.layers.fp8.backends import OwnBackend
    from megalite.layers.fp8.precision import Fp8
    from megalite.layers.parts import choose_parts
    from megalite.model.initialize import FreshWeights, fill
    from megalite.model.spec import StageSpec
    from megalite.model.transformer import Stage
    from megalite.parallel.axes import SINGLE
    from tests.layers.small import small_model

    model, device = small_model(num_kv_heads=2), torch.device("cuda", 0)
    parts = choose_parts(model, "cuda", torch.bfloat16)
    if name != "bf16":
        config = Fp8Config(backend="scaled_mm", recipe=name)
        backend = OwnBackend(config, tp=SINGLE, replicas=SINGLE, device=device, keep_weights=True)
        parts = dataclasses.replace(parts, precision=Fp8(config, NUM_LAYERS, backend))
    stage = Stage(StageSpec(model, recompute=recompute, parts=parts))
    fill(stage, FreshWeights(model, 1))
    return stage.to(torch.bfloat16).to(device)


def _step(stage: Any, lengths: tuple[int, ...]) -> float:
    import torch

    from megalite.layers.documents import Documents, Targets

    num_tokens = sum(lengths)
    tokens = torch.arange(num_tokens) * 7 % 101
    borders = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in lengths])
    tokens, borders, positions, keys = (x.cuda() for x in (tokens, borders, positions, torch.arange(num_tokens)))
    targets = Targets(tokens.roll(-1), torch.full((num_tokens,), 1 / num_tokens).cuda())
    loss = stage(tokens, Documents(positions, borders, SEQ_LEN, keys), targets)
    loss.backward()
    return loss.item()


def _compare(name: str, graphs: list[Any]) -> dict[str, Any]:
    """Compiled blocks against eager ones, over batches that differ."""
    import torch

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    graphs.clear()
    eager, compiled = _make(name), _make(name)
    compiled.compile_blocks()
    worst = 0.0
    for lengths in BATCHES:
        worst = max(worst, abs(_step(eager, lengths) - _step(compiled, lengths)))
        for one, other in zip(eager.parameters(), compiled.parameters(), strict=True):
            worst = max(worst, ((one.grad - other.grad).cpu().abs().max() / one.grad.cpu().abs().max()).item())
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    return {"graphs": len(graphs), "breaks": breaks, "worst": worst}


def _products(name: str, kind: str) -> dict[str, int]:
    """Products of a forward and a backward pass of eager blocks."""
    from torch.utils._python_dispatch import TorchDispatchMode

    counts: collections.Counter[str] = collections.Counter()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
            counts[op.name().partition("::")[2]] += 1
            return op(*args, **(kwargs or {}))

    stage = _make(name, kind)
    with Counting():
        _step(stage, BATCHES[1])
    return {op: count for op, count in counts.items() if op in ("mm", "_scaled_mm", "_varlen_attn")}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.stdin.read())["library"])), flush=True)
    os._exit(0)  # the compiler's threads may still run, and a process that ends beside them aborts
