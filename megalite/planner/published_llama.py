"""Runs of Llama 3 by Meta, torchtitan and Megatron Bridge.

    Grattafiori et al. 2024   "The Llama 3 Herd of Models", table 4, its two rows of 8,192 tokens. Not said, and taken
                              to be: FLOPs are those of a causal model, four chunks of a stage, nothing recomputed. Its
                              row of 131,072 tokens is left out: two fifths of its seconds hang on that convention
    torchtitan                benchmarks/llama3_h100_202412_torchtitan.md, tables 1, 3, 4 and 5. By its code of that day
                              a pipeline has as many micro-batches as stages where nothing else is said, two chunks of
                              a stage when interleaved, blocks divided as here, and keeps its weights whole; Float8
                              casts in passes of their own. Tables 2 and 6 are left out: rings, of which it is not said
                              how they divide what a causal mask hides
    Megatron Bridge           its performance summaries, every row of 8,192 tokens of a Llama 3 on 8 to 1,024 H100 from
                              release 25.09 to 26.06, FP8 by current scaling. By its recipes of those days blocks are
                              divided evenly, counting embedding and head as one each where they do not come out even,
                              8B makes five blocks again from 25.11 on, and gradients travel in bf16

FP8 is Transformer Engine's in all of them, as far as the clock goes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megalite.planner.practice import Practice
from megalite.planner.published_run import SHOWN_OF_HIDDEN, LlamaShape, PublishedRun, Software, Three

L8B, L70B = LlamaShape(4096, 32, 32, 14336, 8192), LlamaShape(8192, 80, 64, 28672, 8192)
L405B = LlamaShape(16384, 126, 128, 53248, 8192)
OF_405B = [1, *[2] * 62, 1]
"""Blocks of 64 chunks, of which the first has the embedding too and the last the head."""
FIVE_BLOCKS = ({"first": 5, "mode": "full"},)
FP8 = {"fp8": {"backend": "te", "recipe": "current"}}
FULLY_SHARDED = {"zero_stage": 3, "engine": "fsdp2"}

CAST_BYTES = 5.0
"""Of a number that becomes FP8 by passes of its own: 2 read for the scale, 2 read and 1 written."""
NOT_ZERO_BUBBLE = Practice(schedules=frozenset({"1f1b", "interleaved"}), offloads=False)
FLOAT8 = replace(NOT_ZERO_BUBBLE, cast_bytes=CAST_BYTES)
META = Software("h100-sxm", "meta-2024", NOT_ZERO_BUBBLE, "fp32")
TITAN = Software("h100-96g", "torchtitan-2024", FLOAT8, "fp32")
TITAN_ASYNC = replace(TITAN, practice=replace(FLOAT8, visible_messages=SHOWN_OF_HIDDEN))
TITAN_EAGER = replace(TITAN, name="torchtitan-2024-eager")
HIDING_TP = replace(NOT_ZERO_BUBBLE, visible_messages=SHOWN_OF_HIDDEN)
BRIDGE = Software("h100-sxm", "megatron-bridge-25.09", HIDING_TP, "bf16")


def _seconds(shape: LlamaShape, batch: int, ranks: int, tokens_per_second: float) -> float:
    """Of a step at so many tokens a second a rank."""
    return batch * shape.seq / ranks / tokens_per_second


def _meta(ranks: int, batch: int, tflops: float) -> PublishedRun:
    seconds = _seconds(L405B, batch, ranks, tflops * 1e12 / L405B.flops_per_token)
    parallel = {"blocks_per_chunk": OF_405B, "sequence_parallel": True}
    return META.run(f"Llama 3 405B on {ranks:,}", L405B, (8, 16, 4), (1, ranks, batch), seconds, parallel=parallel)


def _sharded(software: Software, name: str, ranks: int, tokens_per_second: float, **settings: Any) -> PublishedRun:
    """torchtitan's 8B, weights divided over all ranks: two sequences on each, what is cheap made again."""
    compiled = "off" if software is TITAN_EAGER else "on"
    seconds, sizes = _seconds(L8B, 2 * ranks, ranks, tokens_per_second), (2, ranks, 2 * ranks)
    train = {"recompute": "selective", "compile": compiled}
    return software.run(name, L8B, (1, 1, 1), sizes, seconds, parallel=FULLY_SHARDED, train=train, **settings)


def _titan(
    software: Software,
    name: str,
    shape: LlamaShape,
    mesh: Three,
    sizes: Three,
    tokens_per_second: float,
    **parallel: Any,
) -> PublishedRun:
    """Of torchtitan in FP8, all recomputed."""
    _, ranks, batch = sizes
    return software.run(
        name,
        shape,
        mesh,
        sizes,
        _seconds(shape, batch, ranks, tokens_per_second),
        parallel={"sequence_parallel": True, **parallel},
        train={"recompute": "full", "compile": "on"},
        precision=FP8,
    )


def _bridge() -> Iterator[PublishedRun]:
    """By release: sequences of a step, and tokens a second a GPU."""
    for release, rate, recomputed in (("25.09", 14079.0, ()), ("25.11", 14451.0, FIVE_BLOCKS)):
        seconds, train = _seconds(L8B, 128, 8, rate), {"recompute_layers": recomputed}
        name, sizes = f"Llama 3 8B, {release}", (1, 8, 128)
        yield BRIDGE.run(name, L8B, (1, 1, 1), sizes, seconds, parallel=FULLY_SHARDED, precision=FP8, train=train)
    rows = ("25.09", 128, 1619.0), ("25.11", 128, 1602.0), ("26.02", 256, 1621.0), ("26.02.01", 256, 1639.0)
    for release, batch, rate in (*rows, ("26.04", 256, 1633.0), ("26.04.01", 256, 1664.0)):
        seconds, parallel = _seconds(L70B, batch, 64, rate), {"sequence_parallel": True}
        name = f"Llama 3 70B, {release}"
        yield BRIDGE.run(name, L70B, (4, 8, 5), (1, 64, batch), seconds, parallel=parallel, precision=FP8)
    mesh = {"cp": 2, "dp": 8, "cp_kind": "allgather", "sequence_parallel": True, "blocks_per_chunk": OF_405B}
    rows = ("25.09", 512, 302.0), ("25.11", 512, 292.0), ("26.02", 1536, 311.0), ("26.04.01", 1536, 328.0)
    for release, batch, rate in (*rows, ("26.06", 1536, 326.0)):
        seconds, name = _seconds(L405B, batch, 1024, rate), f"Llama 3 405B, {release}"
        yield BRIDGE.run(name, L405B, (8, 8, 8), (1, 1024, batch), seconds, parallel=mesh, precision=FP8)


RUNS = (
    _meta(8192, 2048, 430),
    _meta(16384, 2048, 400),
    _sharded(TITAN_EAGER, "Llama 3 8B on 8", 8, 5762),
    _sharded(TITAN_EAGER, "Llama 3 8B on 128", 128, 5605),
    _sharded(TITAN, "Llama 3 8B on 8", 8, 6667),
    _sharded(TITAN, "Llama 3 8B on 128", 128, 6514),
    _sharded(TITAN, "Llama 3 8B on 8, FP8", 8, 8532, precision=FP8),
    _sharded(TITAN, "Llama 3 8B on 128, FP8", 128, 8380, precision=FP8),
    _titan(TITAN, "Llama 3 70B", L70B, (8, 1, 1), (16, 256, 512), 829, **FULLY_SHARDED),
    _titan(TITAN_ASYNC, "Llama 3 70B, hidden tp", L70B, (8, 1, 1), (16, 256, 512), 876, **FULLY_SHARDED),
    _titan(TITAN_ASYNC, "Llama 3 405B", L405B, (8, 8, 1), (4, 512, 256), 100, blocks_per_stage=[15, *[16] * 6, 15]),
    _titan(
        TITAN_ASYNC,
        "Llama 3 405B, interleaved",
        L405B,
        (8, 8, 2),
        (4, 512, 256),
        128,
        blocks_per_chunk=[7, *[8] * 14, 7],
    ),
    *_bridge(),
)
