"""Layouts that a search looks at: those that the software has."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megalite.config.checks_graphs import check_graphs
from megalite.config.fill import fill
from megalite.config.schema import Config
from megalite.planner.layouts import Candidate, layouts
from megalite.planner.machines import load_machine
from megalite.planner.practice import OURS, Practice

H100, CPU = load_machine("h100-sxm"), load_machine("cpu")
SIZES = {"hidden_size": 64, "num_layers": 8, "num_heads": 8, "ffn_hidden_size": 128, "vocab_size": 64}
BASE = Config(
    model={**SIZES, "moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 64}},
    batch={"global_batch_size": 32, "seq_len": 8192},
    train={"steps": 1},
)


def found(practice: Practice, base: Config = BASE, machine=H100) -> list[Candidate]:
    return list(layouts(base, fill(base, 64), 8, machine, practice))


@pytest.mark.parametrize("axis", ["tp", "cp", "ep", "pp", "dp"])
def test_axes_that_software_has_not(axis: str):
    """None of its layouts has them, and all others are there."""
    every, fewer = found(OURS), found(replace(OURS, axes=OURS.axes - {axis}))
    assert fewer
    assert fewer == [each for each in every if getattr(each, axis) == 1] != every


@pytest.mark.parametrize(
    ("practice", "has"),
    [
        (replace(OURS, schedules=frozenset({"1f1b"})), lambda each: each.pp == 1 or each.schedule == "1f1b"),
        (replace(OURS, recomputes=frozenset({"full"})), lambda each: each.recompute == "full"),
        (replace(OURS, offloads=False), lambda each: not each.offloads),
        (replace(OURS, divides_weights=True), lambda each: each.divides_weights),
        (replace(OURS, divides_weights=False), lambda each: not each.divides_weights),
        (replace(OURS, least_stages_of_chunks=3), lambda each: each.schedule != "interleaved" or each.pp > 2),
    ],
)
def test_what_else_software_has_not(practice: Practice, has):
    every, fewer = found(OURS), found(practice)
    assert fewer == [each for each in every if has(each)] != every


def test_what_software_always_does():
    """Without sequence parallelism every tp has the whole stream; without ZeRO nothing is divided over dp."""
    for each in found(replace(OURS, divides_sequences=False)):
        assert not (each.settings["parallel"]["sequence_parallel"])
    stages = {each.settings["parallel"]["zero_stage"] for each in found(replace(OURS, divides_state=False))}
    assert stages == {0, 3}
    assert {each.tp for each in found(replace(OURS, divides_sequences=False))} == {each.tp for each in found(OURS)}


def test_numbers_of_chunks():
    """All up to eight for which there are blocks."""
    base = Config(model={**SIZES, "num_layers": 28}, batch={"global_batch_size": 32}, train={"steps": 1})
    tried = {(each.pp, each.chunks) for each in found(OURS, base) if each.schedule == "interleaved"}
    assert {chunks for pp, chunks in tried if pp == 2} == {2, 3, 4, 5, 6, 7, 8}
    assert {chunks for pp, chunks in tried if pp == 4} == {2, 3, 4, 5, 6, 7}


@pytest.mark.parametrize(("seq_len", "most"), [(512, 128), (1024, 64), (4096, 16), (16384, 16)])
def test_short_sequences_come_in_larger_micro_batches(seq_len: int, most: int):
    base = Config(model=SIZES, batch={"global_batch_size": 2048, "seq_len": seq_len}, train={"steps": 1})
    assert max(each.micro_batch_size for each in found(OURS, base)) == most


def test_records_where_a_layout_may():
    """`train.cuda_graphs` of a config goes with layouts whose configs may have it, on GPUs, and with no other."""
    base = BASE.model_copy(update={"train": BASE.train.model_copy(update={"cuda_graphs": True})})
    base = base.model_copy(update={"precision": base.precision.model_copy(update={"dtype": "bf16"})})
    every = found(OURS, base)
    for each in every:
        recorded = each.applied_to(base).model_copy(update={"train": base.train})
        may = not list(check_graphs(recorded, fill(recorded, 64))) and not each.offloads
        assert each.settings["train"]["cuda_graphs"] == may
        assert not list(check_graphs(each.applied_to(base), fill(base, 64)))
    assert any(each.is_recorded for each in every)
    assert not any(each.is_recorded for each in [*found(OURS), *found(OURS, base, CPU)])


def test_shared_memory_where_a_layout_may():
    """`parallel.async_tp` of a config goes with tensor parallelism over sequences on GPUs, and with nothing else."""
    base = BASE.model_copy(update={"parallel": BASE.parallel.model_copy(update={"async_tp": True})})
    for each in found(OURS, base):
        can_be = each.tp > 1 and not each.divides_weights
        assert each.settings["parallel"]["async_tp"] == can_be
    assert not any(each.is_async for each in [*found(OURS), *found(OURS, base, CPU)])
