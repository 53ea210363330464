"""Runs that do not fit a machine: refused before their ranks start, with the numbers and the nearest plan that fits."""

from __future__ import annotations

import pytest

from megalite.config.plan import default_world_size, make_plan
from megalite.config.schema import Config
from megalite.config.validate import validate
from megalite.errors import UserError
from megalite.planner.memory import memory_by_stage
from megalite.planner.process import BASE_BYTES
from megalite.train import fit
from megalite.train.fit import (
    GIB,
    check_device_memory,
    check_fit,
    check_shared_memory,
    needed_bytes,
)

SECTIONS = {
    "model": {"preset": "llama-125m", "vocab_size": 32000},
    "batch": {"micro_batch_size": 64, "global_batch_size": 64, "seq_len": 1024},
    "train": {"steps": 1, "device": "cpu"},
}


def planned(**sections: dict):
    config = Config(**{name: {**SECTIONS.get(name, {}), **sections.get(name, {})} for name in {**SECTIONS, **sections}})
    world_size = default_world_size(config)
    validate(config, world_size)
    return config, make_plan(config, world_size)


@pytest.fixture
def machine(monkeypatch):
    """A machine of chosen size."""

    def make(gib: float, cores: int = 4) -> None:
        monkeypatch.setattr(fit, "available_bytes", lambda: int(gib * GIB))
        monkeypatch.setattr(fit, "num_cores", lambda: cores)

    return make


def refusal(config, plan, ranks: range) -> str:
    with pytest.raises(UserError) as caught:
        check_fit(config, plan, ranks)
    return str(caught.value)


def test_what_is_needed_is_the_plan_of_each_rank_and_its_process():
    """Ranks of a pipeline differ, so which of them are here counts."""
    config, plan = planned(parallel={"pp": 2, "tp": 2})
    first, last = (stage.total for stage in memory_by_stage(config, plan))
    assert needed_bytes(config, plan, range(4)) == 2 * first + 2 * last + 4 * BASE_BYTES
    assert needed_bytes(config, plan, range(2, 4)) == 2 * last + 2 * BASE_BYTES


def test_a_smaller_micro_batch_is_named_first(machine):
    """It is refused with what is needed, what there is, and a plan that does fit: taken, it is not refused again."""
    machine(16)
    config, plan = planned()
    said = refusal(config, plan, range(1))
    assert f"needs about {needed_bytes(config, plan, range(1)) / GIB:.1f} GiB" in said
    assert "16.0 GiB are available" in said
    size = int(said.split("batch.micro_batch_size=")[1].split()[0])
    assert "--force" in said
    check_fit(*planned(batch={"micro_batch_size": size}), range(1))
    with pytest.raises(UserError):
        check_fit(*planned(batch={"micro_batch_size": 2 * size}), range(1))


def test_recomputation_and_fewer_ranks_come_next(machine):
    """Where no micro-batch is small enough, and where it is the number of ranks that takes the memory."""
    one = {"batch": {"micro_batch_size": 1, "global_batch_size": 1, "seq_len": 1024}}
    config, plan = planned(**one)
    full = planned(**one, train={"recompute": "full"})
    machine(needed_bytes(*full, range(1)) / GIB)
    assert "train.recompute=full fits" in refusal(config, plan, range(1))
    many = planned(parallel={"dp": 64}, batch={"micro_batch_size": 1})
    machine(24, cores=64)
    assert "parallel.dp=" in refusal(*many, range(64))


def test_nothing_fits(machine):
    """Then that is said."""
    machine(0.5)
    assert "use a smaller model, or more machines" in refusal(*planned(), range(1))


def test_more_ranks_than_cores_can_bear(machine):
    """64 ranks on two cores would never come to a step."""
    machine(1000, cores=2)
    many = planned(parallel={"dp": 64}, batch={"micro_batch_size": 1})
    assert refusal(*many, range(64)).startswith("64 ranks on 2 cores: use at most 8 a core")
    check_fit(*planned(parallel={"dp": 16}, batch={"micro_batch_size": 1}), range(16))


def test_ranks_that_a_launcher_started(machine):
    """They ask what their machine has at all, since a former attempt's memory may not be free yet, and all its cores,
    since each rank may be bound to one; nobody can force them."""
    machine(0.5, cores=1)
    config, plan = planned()
    needed = needed_bytes(config, plan, range(1))
    check_fit(config, plan, range(1), memory=needed, cores=1)
    with pytest.raises(UserError, match="needs about") as caught:
        check_fit(config, plan, range(1), memory=needed - 1, cores=1)
    assert "--force" not in str(caught.value)
    many = planned(parallel={"dp": 16}, batch={"micro_batch_size": 1})
    check_fit(*many, range(16), memory=1000 * GIB, cores=2)


def test_a_device_that_is_too_small():
    """A rank on a GPU asks its own device for its own stage."""
    config, plan = planned(parallel={"pp": 2}, train={"device": "cuda"})
    needed = memory_by_stage(config, plan)[1].total
    check_device_memory(config, plan, 1, needed)
    with pytest.raises(UserError, match=r"pipeline stage 1 needs about .* of its device.* fits"):
        check_device_memory(config, plan, 1, needed - 1)


def test_memory_that_ranks_share():
    """`parallel.async_tp` wants a GPU for each rank of tp, all in one node; a launcher that says nothing is trusted."""
    for local_world_size in (4, 8, None):
        check_shared_memory(True, 4, local_world_size)
    with pytest.raises(UserError, match="this rank has none; use false"):
        check_shared_memory(False, 4, 4)
    with pytest.raises(UserError, match="each tp=4 ranks share memory, and a node has 6"):
        check_shared_memory(True, 4, 6)


def test_a_schedule_of_ones_own_is_kept(machine, tmp_path):
    """It has one number of micro-batches, so no other is proposed."""
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    parallel = {"pp": 2, "schedule": str(path)}
    config, plan = planned(parallel=parallel, batch={"micro_batch_size": 8, "global_batch_size": 16})
    machine(needed_bytes(config, plan, range(2)) / GIB - 0.1)
    said = refusal(config, plan, range(2))
    assert "train.recompute=" in said
    assert "micro_batch_size=" not in said
