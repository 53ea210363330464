"""Runs that others have published, as configs of ours: what the planner's clock is held against.

Each row is a whole training run: model, layout, batch, and the seconds of a step, or what they follow from by the
convention of its paper. Where a paper leaves something open, what is assumed here is said.

    Narayanan et al. 2021     "Efficient Large-Scale Language Model Training on GPU Clusters", table 1: FLOPs are
                              96 B s l h^2 (1 + s / 6h + V / 16 l h), recomputation counted
    Korthikanti et al. 2022   "Reducing Activation Recomputation in Large Transformer Models", tables 4 and 5
    BLOOM 2022                "BLOOM: A 176B-Parameter Open-Access Multilingual Language Model" and its training notes,
                              with a fork of the Megatron-LM of 2021 on nodes of four 100 Gb/s adapters: 105.16 s a step
    Megatron Core 0.8         its README, weak scaling: FLOPs are 72 B s l h^2 (1 + s / 6h + V / 12 l h). It hides
                              messages of tp. Not said, and taken to be: micro-batches of 1 sequence in a pipeline and
                              of all that a rank has without one, and as many chunks of a stage, up to 8, as divide its
                              blocks
    llm-foundry 2023          its benchmark tables of MPT models (`published_mpt`)
    Llama 3                   of Meta, torchtitan and Megatron Bridge (`published_llama`)
"""

from __future__ import annotations

from dataclasses import replace

from megalite.planner import published_llama as llama
from megalite.planner import published_mpt as mpt
from megalite.planner.practice import Practice
from megalite.planner.published_run import SHOWN_OF_HIDDEN, GptShape, PublishedRun, Software, Three

UNFUSED_LOSS = 46.0
"""Bytes of a logit: 6 to cast it to fp32, 4 each for the maximum and the sum, 8 each for the difference, the
exponential, the quotient and the gradient."""
MEGATRON = Practice(
    redoes_attention=True,
    logit_bytes=UNFUSED_LOSS,
    axes=frozenset({"tp", "pp", "dp"}),
    divides_weights=False,
    schedules=frozenset({"1f1b", "interleaved"}),
    offloads=False,
)
# Its megatron/p2p_communication.py synchronizes the device behind each message; megatron/arguments.py refuses chunks of
# two stages.
BEFORE_FLASH = replace(
    MEGATRON,
    fused_attention=False,
    skips_hidden=False,
    hides_reductions=False,
    waits_for_stages=True,
    least_stages_of_chunks=3,
)
ALL_RECOMPUTED = replace(BEFORE_FLASH, divides_sequences=False, recomputes=frozenset({"full"}))
HIDING_TP = replace(MEGATRON, visible_messages=SHOWN_OF_HIDDEN)

MEGATRON_2021 = Software("a100-80g", "megatron-lm-2021", replace(ALL_RECOMPUTED, divides_state=False), "bf16")
MEGATRON_2022 = Software("a100-80g", "megatron-lm-2022", BEFORE_FLASH, "bf16")
BIGSCIENCE = replace(MEGATRON_2021, practice=ALL_RECOMPUTED, network=6.25e9)
MEGATRON_CORE = Software("h100-sxm", "megatron-core-0.8", HIDING_TP, "fp32")


def _narayanan(name: str, numbers: Three, mesh: Three, sizes: Three, tflops: float) -> PublishedRun:
    """A row of table 1; numbers are heads, hidden size, layers."""
    heads, hidden, layers = numbers
    shape = GptShape(hidden, layers, heads, 51200, 2048)
    seconds = shape.flops(sizes[2], with_recompute=True) / (tflops * 1e12 * sizes[1])
    parallel, train = {"zero_stage": 0}, {"recompute": "full"}
    return MEGATRON_2021.run(name, shape, mesh, sizes, seconds, parallel=parallel, train=train)


def _korthikanti(name: str, shape: GptShape, mesh: Three, sizes: Three, seconds: float) -> PublishedRun:
    """With sequence parallelism and selective recomputation where the name says so."""
    is_selective = name.endswith("selective")
    return MEGATRON_2022.run(
        name,
        shape,
        mesh,
        sizes,
        seconds,
        parallel={"zero_stage": 0, "sequence_parallel": is_selective},
        train={"recompute": "selective" if is_selective else "full"},
    )


def _core(name: str, numbers: Three, mesh: Three, sizes: Three, tflops: float) -> PublishedRun:
    """A row of Megatron Core's table; numbers are heads, hidden size, layers."""
    heads, hidden, layers = numbers
    shape = GptShape(hidden, layers, heads, 131072, 4096)
    seconds = shape.flops(sizes[2], with_recompute=False) / (tflops * 1e12 * sizes[1])
    model, parallel = {"tie_embeddings": False}, {"sequence_parallel": mesh[0] > 1}
    return MEGATRON_CORE.run(name, shape, mesh, sizes, seconds, model=model, parallel=parallel)


def _bloom() -> PublishedRun:
    """The first and the last of 12 stages have one block less, for the embedding and the head."""
    shape = GptShape(14336, 70, 112, 250880, 2048)
    parallel = {"zero_stage": 1, "blocks_per_stage": [5, *[6] * 10, 5]}
    train = {"recompute": "full"}
    return BIGSCIENCE.run("BLOOM 176B", shape, (4, 12, 1), (2, 384, 2048), 105.16, parallel=parallel, train=train)


GPT_22B, GPT_530B = GptShape(6144, 48, 64, 51200, 2048), GptShape(20480, 105, 128, 51200, 2048)

RUNS = (
    _narayanan("GPT 1.7B", (24, 2304, 24), (1, 1, 1), (16, 32, 512), 137),
    _narayanan("GPT 7.5B", (32, 4096, 36), (4, 1, 1), (16, 128, 512), 142),
    _narayanan("GPT 39.1B", (64, 8192, 48), (8, 2, 1), (4, 512, 1536), 138),
    _narayanan("GPT 145.6B", (96, 12288, 80), (8, 8, 2), (2, 1536, 2304), 148),
    _narayanan("GPT 529.6B", (128, 20480, 105), (8, 35, 3), (1, 2520, 2520), 163),
    _bloom(),
    _korthikanti("GPT 22B", GPT_22B, (8, 1, 1), (4, 8, 4), 1.42),
    _korthikanti("GPT 22B selective", GPT_22B, (8, 1, 1), (4, 8, 4), 1.10),
    _korthikanti("GPT 530B", GPT_530B, (8, 35, 3), (1, 280, 280), 49.05),
    _korthikanti("GPT 530B selective", GPT_530B, (8, 35, 3), (1, 280, 280), 37.83),
    _core("GPT 1.7B", (16, 2048, 24), (1, 1, 1), (4, 48, 192), 408.8),
    _core("GPT 16B", (48, 6144, 32), (4, 1, 1), (4, 192, 192), 489.1),
    _core("GPT 70B", (64, 8192, 84), (8, 2, 7), (1, 768, 384), 419.7),
    _core("GPT 177B", (96, 12288, 96), (8, 6, 8), (1, 2304, 1152), 432.8),
    _core("GPT 462B", (144, 18432, 112), (8, 16, 7), (1, 6144, 3072), 459.9),
    *(
        PublishedRun(f"MPT {row.name}", machine, "llm-foundry-2023", row.practice, *row.as_run)
        for machine, rows in (("h100-sxm", mpt.H100), ("a100-80g", mpt.A100_80G), ("a100-40g", mpt.A100_40G))
        for row in rows
    ),
    *llama.RUNS,
)
"""A machine of each is in configs/machines."""

UNSEEN = (
    _narayanan("GPT 3.6B", (32, 3072, 30), (2, 1, 1), (16, 64, 512), 138),
    _narayanan("GPT 18.4B", (48, 6144, 40), (8, 1, 1), (8, 256, 1024), 135),
    _narayanan("GPT 76.1B", (80, 10240, 60), (8, 4, 3), (2, 1024, 1792), 140),
    _narayanan("GPT 310.1B", (128, 16384, 96), (8, 16, 2), (1, 1920, 2160), 155),
    _narayanan("GPT 1008B", (160, 25600, 128), (8, 64, 1), (1, 3072, 3072), 163),
)
"""The other rows of the table of 2021, which nothing was fitted to: the planner met them when all else was done, but
for stages that stand still and passes over scores, which came after them, from the software's code. Layouts and chunks
are those of the scripts that its authors published (Megatron-LM, examples/sc21)."""
