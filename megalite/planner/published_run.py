"""A run that others have published, as a config of ours: its model, layout, batch, and the seconds of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from megalite.config.plan import RunPlan, make_plan
from megalite.config.schema import Config
from megalite.planner.machines import Machine
from megalite.planner.practice import Practice

SHOWN_OF_HIDDEN = 0.25
"""Of messages between ranks of tp that software hides behind products, the share that is taken to show, for all of
it."""


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
    network: float | None = None
    """Bytes a second between nodes, where they are not the machine's."""

    @cached_property
    def config(self) -> Config:
        """The run as a config of ours."""
        return Config(**self.settings)

    @cached_property
    def plan(self) -> RunPlan:
        """Its plan."""
        return make_plan(self.config, self.world_size)

    def on(self, machine: Machine) -> Machine:
        """A machine with this run's network."""
        return machine if self.network is None else machine.model_copy(update={"network": self.network})


@dataclass(frozen=True)
class GptShape:
    """A GPT of Megatron's tables."""

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


@dataclass(frozen=True)
class LlamaShape:
    """A Llama 3."""

    hidden: int
    layers: int
    heads: int
    ffn: int
    seq: int

    @property
    def flops_per_token(self) -> float:
        """Of the model, by Meta's convention as it is taken here: tokens see those before them."""
        width, kv = self.hidden, self.hidden * KV_HEADS // self.heads
        weights = self.layers * (2 * width**2 + 2 * width * kv + 3 * width * self.ffn) + LLAMA_VOCAB * width
        return 6.0 * weights + 6.0 * self.layers * self.seq * width

    def model(self) -> dict[str, Any]:
        """As a section `model`."""
        return {
            "hidden_size": self.hidden,
            "num_layers": self.layers,
            "num_heads": self.heads,
            "num_kv_heads": KV_HEADS,
            "ffn_hidden_size": self.ffn,
            "vocab_size": LLAMA_VOCAB,
            "max_positions": self.seq,
        }


KV_HEADS, LLAMA_VOCAB = 8, 128256
"""Of every Llama 3."""

Three = tuple[int, int, int]


class PublishedShape(Protocol):
    """A model of a table."""

    @property
    def layers(self) -> int: ...

    @property
    def seq(self) -> int: ...

    def model(self) -> dict[str, Any]:
        """As a section `model`."""
        ...


@dataclass(frozen=True)
class Software:
    """What runs of a table have in common."""

    machine: str
    name: str
    practice: Practice
    reduce_dtype: str
    """In which gradients travel between replicas."""
    network: float | None = None
    """Bytes a second between nodes, where they are not the machine's."""

    def run(
        self, name: str, shape: PublishedShape, mesh: Three, sizes: Three, seconds: float, **settings: dict[str, Any]
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
        even = [shape.layers // (pp * chunks)] * (pp * chunks)  # rows that are not give theirs in `settings`
        if pp > 1:
            parallel |= {"blocks_per_stage": even} if chunks == 1 else {"chunks": chunks, "blocks_per_chunk": even}
            parallel["schedule"] = "1f1b" if chunks == 1 else "interleaved"
        sections = {
            "model": shape.model() | settings.get("model", {}),
            "parallel": parallel | settings.get("parallel", {}),
            "batch": {"micro_batch_size": micro, "global_batch_size": batch, "seq_len": shape.seq},
            "train": {"steps": 1, "compile": "off"} | settings.get("train", {}),
            "precision": {"reduce_dtype": self.reduce_dtype} | settings.get("precision", {}),
        }
        return PublishedRun(name, self.machine, self.name, self.practice, seconds, ranks, sections, self.network)
