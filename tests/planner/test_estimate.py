"""What fits: which bytes are held against a machine's memory."""

from __future__ import annotations

from typing import Any

import pytest

from megalite.config.plan import make_plan
from megalite.config.schema import Config
from megalite.planner.estimate import Estimate, estimate, memory_if_fits
from megalite.planner.machines import Machine, load_machine
from megalite.planner.memory import on_device
from megalite.planner.practice import OURS
from megalite.planner.process import BASE_BYTES, KERNEL_BYTES, process_bytes
from megalite.planner.search import search

CPU, H100 = load_machine("cpu"), load_machine("h100-sxm")
GIB = 2**30
RANKS = 2
DIVIDED = {"engine": "fsdp2", "zero_stage": 3}


def config_of(**sections: Any) -> Config:
    model = {"hidden_size": 256, "num_layers": 4, "num_heads": 4, "ffn_hidden_size": 688, "vocab_size": 4096}
    batch = {"micro_batch_size": 2, "global_batch_size": 8, "seq_len": 256}
    return Config(model=model, batch=batch, train={"steps": 1}, **{"precision": {"dtype": "fp32"}, **sections})


def with_memory(machine: Machine, taken: float) -> Machine:
    return machine.model_copy(update={"memory_gib": taken / GIB})


@pytest.mark.parametrize("parallel", [{}, DIVIDED, {"pp": 2}])
def test_a_process_must_fit_on_a_cpu(parallel: dict[str, Any]):
    """All that a rank's process takes, by the engine's heap, within nine tenths of its share of the machine; whoever
    looks for what fits is told the same."""
    config = config_of(parallel=parallel)
    of_cpu = on_device(config, "cpu")

    def judged(memory: float) -> Estimate:
        found = estimate(config, RANKS, with_memory(CPU, memory))
        plan, machine = make_plan(of_cpu, RANKS), with_memory(CPU, memory)
        taken = memory_if_fits(of_cpu, plan, machine, vocab_size=None, practice=OURS)
        assert (taken is not None) == found.fits
        return found

    taken = judged(8 * GIB)
    assert taken.memory == taken.process == tuple(process_bytes(of_cpu, tensors) for tensors in taken.tensors)
    most = max(taken.process)
    assert most > 1.04 * max(taken.tensors) + BASE_BYTES + KERNEL_BYTES
    assert judged(1.01 * most / 0.9).fits
    assert not judged(0.99 * most / 0.9).fits
    said = taken.to_dict()
    assert (said["memory_bytes"], said["process_bytes"]) == (list(taken.tensors), list(taken.process))


def test_tensors_must_fit_on_a_gpu():
    """Within nine tenths of its memory, less 2 GiB for the driver and for NCCL."""
    config = config_of()
    taken = estimate(config, 8, H100)
    assert taken.memory == taken.tensors
    assert taken.to_dict()["process_bytes"] is None
    needed = (max(taken.tensors) + 2 * GIB) / 0.9
    for share, fits in ((1.01, True), (0.99, False)):
        assert estimate(config, 8, with_memory(H100, share * needed)).fits == fits


def test_a_search_on_cpus_finds_what_fits_in_a_small_memory():
    """Below the 2 GiB that are set aside on GPUs; and says processes where none fits."""
    found = search(config_of(), RANKS, with_memory(CPU, 1.5 * GIB), top=3)
    assert found.best
    assert all(max(each.process) <= 0.9 * 1.5 * GIB for each in found.best)
    none = search(config_of(), RANKS, with_memory(CPU, 0.4 * GIB), top=3)
    assert none.smallest is not None
    assert max(none.smallest.memory) > none.usable == int(0.9 * 0.4 * GIB)
