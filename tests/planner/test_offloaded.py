"""Seconds of an optimizer in the host's memory: what is counted of its update and of the ways there and back."""

from __future__ import annotations

from typing import Any

import pytest

from megalite.config.schema import Config
from megalite.planner.estimate import estimate
from megalite.planner.left_out import left_out_of_steps
from megalite.planner.machines import Machine, load_machine

H200 = load_machine("h200")
SIZES = {"hidden_size": 2048, "num_layers": 24, "num_heads": 16, "ffn_hidden_size": 5632, "vocab_size": 32000}


def config(*, offload: bool, sequences: int = 16, **sections: Any) -> Config:
    """1.3B of the benchmark on an H200."""
    optimizer = {"offload": offload, **sections.pop("optimizer", {})}
    return Config(
        model=SIZES | {"tie_embeddings": True},
        batch={"seq_len": 2048, "micro_batch_size": min(sequences, 16), "global_batch_size": sequences},
        train={"steps": 1, "compile": "on"},
        optimizer=optimizer,
        **sections,
    )


def seconds_of(name: str, *, ranks: int = 1, machine: Machine = H200, **settings: Any) -> float:
    """That offloading adds to a part of a step."""
    with_it, without = (
        estimate(config(offload=offload, **settings), ranks, machine).parts.get(name, 0.0) for offload in (True, False)
    )
    return with_it - without


def test_one_that_was_measured():
    """1.3B on one H200, 19,112 tokens a second (docs/benchmarks/2026-11-27-gpu-h200-kernels.json)."""
    assert estimate(config(offload=True), 1, H200).tokens_per_second == pytest.approx(19_112, rel=0.05)


def test_an_update_on_the_host():
    """Once a step, of a rank's share: state and masters over the host's memory, fp32 there and bf16 back."""
    numbers = 24 * (4 * 2048**2 + 3 * 2048 * 5632 + 2 * 2048) + 2048 + 32000 * 2048
    moved = 2 * (8 + 4) + 4 + 2  # two moments and a master, each read and written; a gradient read, a weight written
    of_host, way = moved / (76.8e9 * 0.5), (4 + 2) / (64e9 * 0.75)
    of_device = moved / (H200.memory_bandwidth * H200.constants.passes)
    assert seconds_of("optimizer") == pytest.approx(numbers * (of_host + way - of_device), rel=1e-3)
    assert seconds_of("optimizer", sequences=64) == pytest.approx(seconds_of("optimizer"))
    halved = seconds_of("optimizer", ranks=2, sequences=32, parallel={"zero_stage": 1})
    assert halved == pytest.approx(seconds_of("optimizer") / 2, rel=1e-3)


def test_rows_that_are_gathered_from_the_host():
    """FSDP2's go to the device twice a micro-batch, and their gradients back: behind the passes, unless the way is
    slow."""
    fsdp2: dict[str, Any] = {"parallel": {"zero_stage": 3, "engine": "fsdp2"}, "ranks": 2}
    few, many = (seconds_of("optimizer", sequences=sequences, **fsdp2) for sequences in (32, 128))
    assert 0 < many - few < 3 * few
    slow = H200.model_copy(update={"host_link": 64e7})
    few, many = (seconds_of("optimizer", sequences=sequences, machine=slow, **fsdp2) for sequences in (32, 128))
    assert many > 2 * few


@pytest.mark.parametrize("missing", ["host_bandwidth", "host_link"])
def test_a_machine_that_does_not_say_how_quick_its_host_is(missing: str):
    machine = H200.model_copy(update={missing: None})
    assert seconds_of("optimizer", machine=machine) == 0
    (note,) = left_out_of_steps(config(offload=True), machine)
    assert note.endswith(f"is not counted: the machine has no {missing}")


def test_what_is_said_of_an_update_with_products():
    assert left_out_of_steps(config(offload=True), H200) == []
    (note,) = left_out_of_steps(config(offload=True, optimizer={"name": "muon"}), H200)
    assert "products of an offloaded muon" in note


def test_a_cpu_has_one_memory():
    cpu = load_machine("cpu")
    assert seconds_of("optimizer", machine=cpu, precision={"dtype": "fp32"}) == 0
    assert left_out_of_steps(config(offload=True, precision={"dtype": "fp32"}), cpu) == []
