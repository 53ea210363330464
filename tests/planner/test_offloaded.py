"""Seconds of an optimizer in the host's memory: what is counted of its update and of the ways there and back."""

from __future__ import annotations

from typing import Any

import pytest

from megalite.config.schema import Config
from megalite.planner.estimate import estimate
from megalite.planner.left_out import left_out_of_steps
from megalite.planner.machines import Machine, load_machine

H200 = load_machine("h200")
NUMBERS = 24 * (4 * 2048**2 + 3 * 2048 * 5632 + 2 * 2048) + 2048 + 32000 * 2048
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
    moved = 2 * (8 + 4) + 4 + 2  # two moments and a master, each read and written; a gradient read, a weight written
    of_host, way = moved / (76.8e9 * 0.5), (4 + 2) / (64e9 * 0.75)
    of_device = moved / (H200.memory_bandwidth * H200.constants.passes)
    assert seconds_of("optimizer") == pytest.approx(NUMBERS * (of_host + way - of_device), rel=1e-3)
    assert seconds_of("optimizer", sequences=64) == pytest.approx(seconds_of("optimizer"))
    halved = seconds_of("optimizer", ranks=2, sequences=32, parallel={"zero_stage": 1})
    assert halved == pytest.approx(seconds_of("optimizer") / 2, rel=1e-3)


def test_rows_that_are_gathered_from_the_host():
    """FSDP2's go to the device for each gather, and a step's first gradients back, behind the passes; what further
    micro-batches add up there is waited for: fp32 over the link, and three numbers of the host's memory."""
    fsdp2: dict[str, Any] = {"parallel": {"zero_stage": 3, "engine": "fsdp2"}, "ranks": 2}
    one, two, four = (seconds_of("optimizer", sequences=32 * count, **fsdp2) for count in (1, 2, 4))
    assert four - two == pytest.approx(2 * (two - one), rel=1e-6)
    rows = NUMBERS / 2
    waited = rows * (4 / (64e9 * 0.75) + 12 / (76.8e9 * 0.5))
    hidden = 2 * rows * 4 / (64e9 * 0.75)  # of gathers, of which a tenth shows
    assert waited < two - one < waited + 0.11 * hidden
    slow = H200.model_copy(update={"host_link": 64e7})
    assert seconds_of("optimizer", sequences=64, machine=slow, **fsdp2) > 10 * two


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


def test_nothing_is_known_of_the_host():
    machine = H200.model_copy(update={"host_bandwidth": None, "host_link": None})
    (note,) = left_out_of_steps(config(offload=True), machine)
    assert note.endswith("has no host_link and no host_bandwidth")


def test_a_cpu_has_one_memory():
    cpu = load_machine("cpu").model_copy(update={"host_link": 1e9, "host_bandwidth": 1e9})
    assert seconds_of("optimizer", machine=cpu, precision={"dtype": "fp32"}) == 0
    assert left_out_of_steps(config(offload=True, precision={"dtype": "fp32"}), cpu) == []
