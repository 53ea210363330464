"""Runs that others have published, as configs of ours: what the planner's clock is held against.

Each row is a whole training run: model, layout, batch, and the seconds of a step, or what they follow from by the
convention of its paper. Where a paper leaves something open, what is assumed here is said.

    Narayanan et al. 2021     "Efficient Large-Scale Language Model Training on GPU Clusters", table 1: FLOPs are
                              96 B s l h^2 (1 + s / 6h + V / 16 l h), recomputation counted
    Korthikanti et al. 2022   "Reducing Activation Recomputation in Large Transformer Models", tables 4 and 5
    Megatron Core 0.8         its README, weak scaling: FLOPs are 72 B s l h^2 (1 + s / 6h + V / 12 l h). It hides
                              messages of tp, of which 0.3 are taken to show. Not said, and taken to be: micro-batches
                              of 1 sequence, and as many chunks of a stage, up to 8, as divide its blocks
    llm-foundry 2023          its benchmark tables of MPT models (`published_mpt`)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from megalite.config.plan import RunPlan, make_plan
from megalite.config.schema import Config
from megalite.planner import published_mpt as mpt
from megalite.planner.practice import Practice

BEFORE_FLASH = Practice(fused_attention=False, skips_hidden=False, hides_reductions=False, redoes_attention=True)
HIDING_TP = Practice(redoes_attention=True, visible_messages=0.3)


@dataclass(frozen=True)
class PublishedRun:
    """One of them."""

    name: str
    machine: str
    software: str
    """Name and generation; runs of one have the same constants."""
    practice: Practice
    seconds: float
    """Of a step."""
    world_size: int
    settings: Mapping[str, Any] = field(hash=False)
    """Sections of a config."""

    @cached_property
    def config(self) -> Config:
        """The run as a config of ours."""
        return Config(**self.settings)

    @cached_property
    def plan(self) -> RunPlan:
        """Its plan."""
        return make_plan(self.config, self.world_size)


@dataclass(frozen=True)
class GptShape:
    """A GPT of a table."""

    hidden: int
    layers: int
    heads: int
    vocab: int
    seq: int

    def flops(self, batch: int, *, with_recompute: bool) -> float:
        """Of a step, by the convention of Megatron's tables."""
        factor, of_head = (96, 16) if with_recompute else (72, 12)
        attention, head = self.seq / (6 * self.hidden), self.vocab / (of_head * self.layers * self.hidden)
        return factor * batch * self.seq * self.layers * self.hidden**2 * (1 + attention + head)

    def model(self) -> dict[str, Any]:
        """As a section `model`."""
        return {
            "hidden_size": self.hidden,
            "num_layers": self.layers,
            "num_heads": self.heads,
            "ffn_hidden_size": 4 * self.hidden,
            "vocab_size": self.vocab,
            "max_positions": self.seq,
            "norm": "layernorm",
            "activation": "gelu",
            "positions": "learned",
            "bias": "all",
            "tie_embeddings": True,
            "dropout": 0.1,
        }


Three = tuple[int, int, int]


@dataclass(frozen=True)
class Software:
    """What runs of a table have in common."""

    machine: str
    name: str
    practice: Practice
    reduce_dtype: str
    """In which gradients travel between replicas."""

    def run(
        self, name: str, shape: GptShape, mesh: Three, sizes: Three, seconds: float, **settings: dict[str, Any]
    ) -> PublishedRun:
        """A row.

        Args:
            mesh: tp, pp, chunks of a stage.
            sizes: sequences of a micro-batch, GPUs, sequences of a step.
            seconds: of a step.
            settings: sections of a config, beside what follows from these.
        """
        (tp, pp, chunks), (micro, ranks, batch) = mesh, sizes
        parallel: dict[str, Any] = {"tp": tp, "pp": pp, "dp": ranks // (tp * pp), "engine": "native"}
        even = [shape.layers // (pp * chunks)] * (pp * chunks)
        if pp > 1:
            parallel |= {"blocks_per_stage": even} if chunks == 1 else {"chunks": chunks, "blocks_per_chunk": even}
            parallel["schedule"] = "1f1b" if chunks == 1 else "interleaved"
        sections = {
            "model": shape.model() | settings.get("model", {}),
            "parallel": parallel | settings.get("parallel", {}),
            "batch": {"micro_batch_size": micro, "global_batch_size": batch, "seq_len": shape.seq},
            "train": {"steps": 1, "compile": "off"} | settings.get("train", {}),
            "precision": {"reduce_dtype": self.reduce_dtype},
        }
        return PublishedRun(name, self.machine, self.name, self.practice, seconds, ranks, sections)


MEGATRON_2021 = Software("a100-80g", "megatron-lm-2021", BEFORE_FLASH, "bf16")
MEGATRON_2022 = Software("a100-80g", "megatron-lm-2022", BEFORE_FLASH, "bf16")
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


GPT_22B, GPT_530B = GptShape(6144, 48, 64, 51200, 2048), GptShape(20480, 105, 128, 51200, 2048)

RUNS = (
    _narayanan("GPT 1.7B", (24, 2304, 24), (1, 1, 1), (16, 32, 512), 137),
    _narayanan("GPT 7.5B", (32, 4096, 36), (4, 1, 1), (16, 128, 512), 142),
    _narayanan("GPT 39.1B", (64, 8192, 48), (8, 2, 1), (4, 512, 1536), 138),
    _narayanan("GPT 145.6B", (96, 12288, 80), (8, 8, 2), (2, 1536, 2304), 148),
    _narayanan("GPT 529.6B", (128, 20480, 105), (8, 35, 3), (1, 2520, 2520), 163),
    _korthikanti("GPT 22B", GPT_22B, (8, 1, 1), (4, 8, 4), 1.42),
    _korthikanti("GPT 22B selective", GPT_22B, (8, 1, 1), (4, 8, 4), 1.10),
    _korthikanti("GPT 530B", GPT_530B, (8, 35, 3), (1, 280, 280), 49.05),
    _korthikanti("GPT 530B selective", GPT_530B, (8, 35, 3), (1, 280, 280), 37.83),
    _core("GPT 1.7B", (16, 2048, 24), (1, 1, 1), (1, 48, 192), 408.8),
    _core("GPT 16B", (48, 6144, 32), (4, 1, 1), (1, 192, 192), 489.1),
    _core("GPT 70B", (64, 8192, 84), (8, 2, 7), (1, 768, 384), 419.7),
    _core("GPT 177B", (96, 12288, 96), (8, 6, 8), (1, 2304, 1152), 432.8),
    _core("GPT 462B", (144, 18432, 112), (8, 16, 7), (1, 6144, 3072), 459.9),
    *(
        PublishedRun(f"MPT {row.name}", machine, "llm-foundry-2023", row.practice, *row.as_run)
        for machine, rows in (("h100-sxm", mpt.H100), ("a100-80g", mpt.A100_80G), ("a100-40g", mpt.A100_40G))
        for row in rows
    ),
)
"""A machine of each is in configs/machines."""
