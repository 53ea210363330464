"""The layouts of a model on so many ranks that are worth a look, and the overrides that make them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import gcd
from typing import Any

from megalite.architecture.architecture import Architecture
from megalite.config.schema import Config
from megalite.config.sections.train import RecomputeRule
from megalite.parallel.schedules.kinds import SCHEDULES
from megalite.planner.machines import Machine
from megalite.planner.practice import Practice

MOST_MICRO_BATCH, MOST_TOKENS = 16, 65_536
"""Sequences of a rank at once, and more where they are short: so many tokens."""
LEAST_TOKENS_OF_CP = 2048
"""Of a rank: a sequence is not cut into less, or into less than a quarter of it where it has many ranks."""
MANY_RANKS = 32
"""Of a sequence of the batch."""
CHUNKS = range(2, 9)
"""Of a rank, in interleaved pipelines."""
NODES_OF_COPY = (1, 2, 4, 8, 16, 32)
"""That divide weights among them, where others have them, too (hybrid sharding)."""
RECOMPUTE = ("none", "selective", "full")
"""`train.recompute`, in order."""


Mesh = tuple[int, int, int, int, int, bool]
"""tp, cp, ep, pp, dp, and whether weights are divided over dp."""


@dataclass(frozen=True)
class Candidate:
    """How ranks share a step."""

    tp: int
    cp: int
    ep: int
    pp: int
    dp: int
    schedule: str
    chunks: int | None
    divides_weights: bool
    micro_batch_size: int
    recompute: str
    blocks_again: int = 0
    """Where nothing else is made again: of each stage of the pipeline the first so many blocks are, whole."""
    offloads: bool = False
    """What full recomputation keeps waits in the host's memory."""
    divides_sequences: bool = True
    """Sequence parallelism, where tp is."""
    divides_state: bool = True
    """Of the optimizer, over dp."""
    is_async: bool = False
    """`parallel.async_tp`, where a config has it and a layout may."""
    is_recorded: bool = False
    """`train.cuda_graphs`, likewise."""
    copies: int = 1
    """Groups of replicas, each of which divides the weights among its own (hybrid sharding)."""

    @property
    def may_make_some_again(self) -> bool:
        """Whether it is tried with some of its blocks made again. Where weights are whole, one of a single sequence at
        a time is: more at once take more memory, and are hardly quicker; of divided weights they gather less often."""
        return self.recompute == "none" and (self.micro_batch_size == 1 or self.divides_weights)

    @property
    def mesh(self) -> Mesh:
        """Who shares what."""
        return self.tp, self.cp, self.ep, self.pp, self.dp, self.divides_weights

    @cached_property
    def settings(self) -> dict[str, dict[str, object]]:
        """By section, what makes a config this layout."""
        engine = "fsdp2" if self.divides_weights else "native"
        parallel: dict[str, object] = {
            "tp": self.tp,
            "pp": self.pp,
            "cp": self.cp,
            "ep": self.ep,
            "dp": self.dp,
            "zero_stage": 3 if self.divides_weights else int(self.divides_state),
            "engine": engine,
            "sequence_parallel": self.tp > 1 and self.divides_sequences,
            "schedule": self.schedule,
            "chunks": self.chunks,
            "blocks_per_stage": None,
            "blocks_per_chunk": None,
            "dp_replicate": self.copies,
            "hpz_size": None,
            "async_tp": self.is_async,
            "reduce_within": None,
        }
        if self.cp == 1:
            parallel["cp_kind"] = "allgather"  # another one would be said to have no effect
        return {
            "parallel": parallel,
            "batch": {"micro_batch_size": self.micro_batch_size},
            "train": {
                "recompute": self.recompute,
                "recompute_layers": first_blocks(self.blocks_again),
                "offload_activations": self.offloads,
                "cuda_graphs": self.is_recorded,
            },
        }

    def overrides(self, base: Config) -> tuple[str, ...]:
        """What differs from a config, as the command line takes it."""
        found = []
        for section, settings in self.settings.items():
            for key, value in settings.items():
                if getattr(getattr(base, section), key) != value:
                    found.append(f"{section}.{key}={as_yaml(value)}")
        return tuple(found)

    def applied_to(self, base: Config) -> Config:
        """The config of this layout, whose values are right by themselves; `validate` says what is wrong between."""
        sections = {name: getattr(base, name).model_copy(update=settings) for name, settings in self.settings.items()}
        return base.model_copy(update=sections)


def has(practice: Practice, layout: Candidate) -> bool:
    """Whether software has a layout."""
    axes = {"tp": layout.tp, "cp": layout.cp, "ep": layout.ep, "pp": layout.pp, "dp": layout.dp}
    used = {axis for axis, size in axes.items() if size > 1}
    return (
        used <= practice.axes
        and practice.divides_weights in (None, layout.divides_weights)
        and (layout.pp == 1 or layout.schedule in practice.schedules)
        and (layout.schedule != "interleaved" or layout.pp >= practice.least_stages_of_chunks)
        and layout.recompute in practice.recomputes
        and (practice.offloads or not layout.offloads)
    )


def first_blocks(count: int) -> tuple[RecomputeRule, ...]:
    """`train.recompute_layers` of the first so many blocks of each stage."""
    return (RecomputeRule(first=count),) if count else ()


def as_yaml(value: object) -> str:
    """A setting's value, as the command line takes it."""
    if value is None:
        return "null"
    if isinstance(value, tuple):
        return f"[{', '.join(f'{{mode: {rule.mode}, first: {rule.first}}}' for rule in value)}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def layouts(
    config: Config, model: Architecture, world_size: int, machine: Machine, practice: Practice
) -> Iterator[Candidate]:
    """All that may be legal and the software has: tp within a node, sequences cut where they are long, as many
    micro-batches as a pipeline wants, sequence parallelism where it pays."""
    every = _layouts(config, model, world_size, machine, practice)
    return (layout for layout in every if has(practice, layout))


def _layouts(
    config: Config, model: Architecture, world_size: int, machine: Machine, practice: Practice
) -> Iterator[Candidate]:
    batch = config.batch
    least = LEAST_TOKENS_OF_CP // (4 if batch.global_batch_size * MANY_RANKS <= world_size else 1)
    for tp in _divisors(gcd(model.num_heads, machine.ranks_per_node)):
        for cp in _divisors(world_size // tp) if world_size % tp == 0 else ():
            if cp > 1 and batch.seq_len < least * cp:
                continue
            for pp in _divisors(world_size // (tp * cp)):
                dp = world_size // (tp * cp * pp)
                if pp > model.num_layers or batch.global_batch_size % dp:
                    continue
                for ep in _degrees_of_experts(model, dp * cp):
                    for layout in _of_mesh(config, model, machine, practice, tp=tp, cp=cp, ep=ep, pp=pp, dp=dp):
                        yield from _as_the_config_has_it(config, layout, machine)


def _as_the_config_has_it(config: Config, layout: Candidate, machine: Machine) -> Iterator[Candidate]:
    """With asynchronous tensor parallelism and records where the config has them and the layout may; and with the
    host's memory beside it."""
    if machine.device_type != "cpu":
        if config.parallel.async_tp and layout.tp > 1 and layout.divides_sequences and not layout.divides_weights:
            layout = replace(layout, is_async=True)
        is_whole = layout.pp == layout.cp == layout.ep == 1 and not layout.divides_weights
        if config.train.cuda_graphs and is_whole and not layout.is_async:  # as `config.checks_graphs` has it
            layout = replace(layout, is_recorded=True)
    yield layout
    if layout.recompute == "full" and machine.host_link is not None:
        yield replace(layout, offloads=True, is_recorded=False)


def _sequence_parallelism(tokens: int, tp: int, machine: Machine, practice: Practice) -> list[bool]:
    """With it wherever tp is, since it sends no more and keeps less; without it where sequences cannot be divided, or
    the halves of a sum take longer than the sum."""
    can_divide = tokens % tp == 0 and (tp == 1 or practice.divides_sequences)
    goes_without = tp > 1 and (not can_divide or machine.halves < 1.0)
    return [True] * can_divide + [False] * goes_without


def _degrees_of_experts(model: Architecture, replicas: int) -> list[int]:
    return [1] if model.moe is None else _divisors(gcd(model.moe.num_experts, replicas))


def _of_mesh(
    config: Config, model: Architecture, machine: Machine, practice: Practice, **axes: Any
) -> Iterator[Candidate]:
    """Not of more sequences at once that are cut as well: fewer of each, cut less, go as fast and send less."""
    per_replica, pp = config.batch.global_batch_size // axes["dp"], axes["pp"]
    most = max(MOST_MICRO_BATCH, MOST_TOKENS // config.batch.seq_len)
    sizes = (each for each in _divisors(per_replica) if each <= most)
    for size in (each for each in sizes if gcd(each, axes["cp"]) == 1):
        tokens = size * config.batch.seq_len // axes["cp"]
        choices = product(
            _schedules(model, pp, per_replica // size),
            _divisions_of_weights(machine, **axes),
            RECOMPUTE,
            _sequence_parallelism(tokens, axes["tp"], machine, practice),
        )
        for (schedule, chunks), (divides_weights, copies), recompute, divides_sequences in choices:
            yield Candidate(
                **axes,
                schedule=schedule,
                chunks=chunks,
                divides_weights=divides_weights,
                micro_batch_size=size,
                recompute=recompute,
                divides_sequences=divides_sequences,
                divides_state=practice.divides_state,
                copies=copies,
            )


def _divisions_of_weights(machine: Machine, *, tp: int, cp: int, ep: int, pp: int, dp: int) -> list[tuple[bool, int]]:
    """Whether weights are divided over the replicas, and how many copies these have of them: one, or one for each node,
    or for each two, four and so on, which gather among fewer."""
    replicas, of_node = dp * cp, machine.ranks_per_node // tp
    if pp > 1 or replicas == 1:
        return [(False, 1)]
    groups = [of_node * nodes for nodes in NODES_OF_COPY if of_node * nodes > 1] if ep == 1 else []
    copies = [replicas // group for group in groups if group < replicas and replicas % group == 0]
    return [(False, 1), (True, 1), *((True, each) for each in copies)]


def _schedules(model: Architecture, pp: int, count: int) -> Iterator[tuple[str, int | None]]:
    """Of pipelines whose stages all have work."""
    if pp == 1:
        yield "1f1b", None
        return
    if count < pp:
        return
    yield "1f1b", None
    yield "zb-h1", None
    if 2 * pp <= model.num_layers:
        yield "zb-v", 2
        if count >= SCHEDULES["dualpipe-v"].least_micro_batches(pp):
            yield "dualpipe-v", 2
    if count % pp == 0:
        yield from (("interleaved", chunks) for chunks in CHUNKS if chunks * pp <= model.num_layers)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
