"""What is said to help where a config does not fit: each change is tried, and what is not said does not help."""

from __future__ import annotations

import re
from typing import Any

import pytest

from megalite.config.plan import make_plan
from megalite.config.schema import Config, ParallelConfig
from megalite.config.validate import validate
from megalite.errors import UserError
from megalite.planner.estimate import TAKEN_BYTES, USABLE, estimate, usable_memory
from megalite.planner.layouts import first_blocks
from megalite.planner.machines import Machine, load_machine
from megalite.planner.nearest import Change, _of_any_layout, best_or_offloaded, refusal, what_helps
from megalite.planner.search import search

H100 = load_machine("h100-sxm")
EIGHT_BITS = Change((("optimizer", "name", "adamw8bit"),))
OFFLOADED = Change((("optimizer", "offload", True),))


def config(**sections: Any) -> Config:
    sizes = {"hidden_size": 4096, "num_layers": 32, "num_heads": 32, "ffn_hidden_size": 14336, "vocab_size": 32000}
    train = {"steps": 1, **sections.pop("train", {})}
    return Config(model=sizes, batch={"global_batch_size": 64, "seq_len": 4096}, train=train, **sections)


def refused(base: Config, ranks: int, memory_gib: float) -> str:
    machine = H100.model_copy(update={"memory_gib": memory_gib})
    found = search(base, ranks, machine, top=1)
    assert not found.best
    return str(refusal(found, base, ranks, machine, None))


@pytest.mark.parametrize("memory_gib", [12.0, 18.0])
def test_what_is_said_helps_and_nothing_else(memory_gib: float):
    """Of eight ranks with less and less memory."""
    base, machine = config(precision={"dtype": "bf16"}), H100.model_copy(update={"memory_gib": memory_gib})
    said = refused(base, 8, memory_gib).split("it fits with ")[1]
    for change in (EIGHT_BITS, OFFLOADED):
        assert (str(change) in said) == bool(search(change.applied_to(base), 8, machine, top=1).best), change
    ranks = int(said.split("--world-size ")[1].split(" ")[0].rstrip(","))
    assert search(base, ranks, machine, top=1).best
    assert not search(base, ranks // 2, machine, top=1).best


def test_the_fewest_blocks_that_have_to_be_made_again():
    """Of a layout's own: with them it fits, with one less it does not; none are named where all are needed."""
    base = config(precision={"dtype": "bf16"}, parallel={"zero_stage": 3, "engine": "fsdp2"}, train={"compile": "on"})

    def with_again(count: int) -> Config:
        return base.model_copy(
            update={"train": base.train.model_copy(update={"recompute_layers": first_blocks(count)})}
        )

    least, most = (max(estimate(with_again(count), 8, H100).memory) for count in (31, 1))
    assert least < most
    for memory in (least + 1, (least + most) // 2, most - 1):
        machine = H100.model_copy(update={"memory_gib": (memory + TAKEN_BYTES) / USABLE / 2**30})
        said = what_helps(base, 8, machine, None)
        count = int(re.findall(r"train.recompute_layers=\[\{mode: full, first: (\d+)\}\]", said)[0])
        assert estimate(with_again(count), 8, machine).fits
        assert not estimate(with_again(count - 1), 8, machine).fits
    least_of_all = max(estimate(with_again(31), 8, H100).memory) - 1
    machine = H100.model_copy(update={"memory_gib": (least_of_all + TAKEN_BYTES) / USABLE / 2**30})
    assert "recompute_layers" not in what_helps(base, 8, machine, None)


def test_the_fewest_blocks_of_stages_of_unlike_sizes():
    """As many as the fullest stage has, less one."""
    base = config(precision={"dtype": "bf16"}, parallel={"pp": 4, "dp": 1}, train={"compile": "on"})
    base = base.model_copy(update={"model": base.model.model_copy(update={"num_layers": 18, "vocab_size": 256000})})
    most = max(len(make_plan(base, 4).blocks_of(stage)) for stage in range(4)) - 1
    assert most > 18 // 4 - 1
    train = base.train.model_copy(update={"recompute_layers": first_blocks(most)})
    taken = max(estimate(base.model_copy(update={"train": train}), 4, H100).memory)
    machine = H100.model_copy(update={"memory_gib": (taken + 1 + TAKEN_BYTES) / USABLE / 2**30})
    assert f"first: {most}}}]" in what_helps(base, 4, machine, None)


def test_with_an_offloaded_optimizer_where_nothing_else_fits():
    """The best layouts of a search that has it, and no others where something fits, or nothing does with it."""
    base, machine = config(precision={"dtype": "bf16"}), H100.model_copy(update={"memory_gib": 18.0})
    found, (why,) = best_or_offloaded(search(base, 8, machine, top=3), base, 8, machine, None, top=3)
    away = search(OFFLOADED.applied_to(base), 8, machine, top=3).best
    assert [each.seconds for each in found] == [each.seconds for each in away]
    assert all(each.overrides[-1] == "optimizer.offload=true" for each in found)
    assert why.startswith("no layout fits: the smallest takes")
    assert why.endswith("; what is shown has optimizer.offload=true")
    assert best_or_offloaded(search(base, 8, H100, top=3), base, 8, H100, None, top=3) == (
        list(search(base, 8, H100, top=3).best),
        [],
    )
    for given, memory_gib in ((base, 3.0), (OFFLOADED.applied_to(base), 3.0)):
        scanty = H100.model_copy(update={"memory_gib": memory_gib})
        with pytest.raises(UserError, match="no layout fits"):
            best_or_offloaded(search(given, 8, scanty, top=3), given, 8, scanty, None, top=3)


def test_bf16_is_proposed_as_it_can_be():
    """Products that round are those of fp32 alone."""
    base = config(precision={"dtype": "fp32", "products": "tf32"}, parallel={"dp": 8})
    changed = next(_of_any_layout(base, H100)).applied_to(base)
    validate(changed, 8)
    assert (changed.precision.dtype, changed.precision.products) == ("bf16", "fp32")


def test_what_is_there_already_is_not_said():
    base = config(optimizer={"name": "adamw8bit", "offload": True}, precision={"dtype": "bf16"})
    said = refused(base, 8, 3.0)
    assert "adamw8bit or" not in said
    assert "it fits with --world-size" in said


def test_where_the_host_is_what_is_short():
    """Of a node's memory too little for what is offloaded: nothing offloaded is said to fit, and the layout that takes
    the least of it is named."""
    base, machine = config(optimizer={"offload": True}, precision={"dtype": "bf16"}), scarce(4.0)
    nothing = search(base, 8, machine, top=1)
    assert not nothing.best
    said = str(refusal(nothing, base, 8, machine, None))
    assert "GiB a rank of its node's" in said
    assert "optimizer.offload=false" in said.split("it fits with ")[1]
    assert search(config(precision={"dtype": "bf16"}), 8, machine, top=1).best
    found = search(base, 8, machine, top=1).smallest
    assert found is not None
    judged = (estimate(each, 8, machine) for each in layouts_of(base))
    assert max(found.host) <= min(max(each.host) for each in judged if max(each.memory) <= usable_memory(machine))


def scarce(host_memory_gib: float) -> Machine:
    return H100.model_copy(update={"host_memory_gib": host_memory_gib})


def layouts_of(base: Config) -> list[Config]:
    """Some that fit, by hand: weights whole, divided, and in stages."""
    ways = [{"dp": 8}, {"dp": 8, "zero_stage": 3, "engine": "fsdp2"}, {"dp": 4, "tp": 2}, {"dp": 2, "pp": 4}]
    return [base.model_copy(update={"parallel": ParallelConfig(**way)}) for way in ways]


def test_nothing_helps():
    """A machine that nothing is left of."""
    said = refused(config(precision={"dtype": "bf16"}), 8, 2.5)
    assert "nor does it with up to 16,384 ranks, optimizer.offload=true or optimizer.name=adamw8bit" in said


def test_more_ranks_than_most_runs_have():
    """Twice as many are tried all the same, and no number is said to be tried that was not."""
    small = {"hidden_size": 4096, "num_layers": 1, "num_heads": 1, "ffn_hidden_size": 14336, "vocab_size": 32000}
    base = Config(model=small, batch={"global_batch_size": 12288}, train={"steps": 1})
    assert "nor does it with up to 24,576 ranks" in refused(base, 12288, 2.3)
    assert "nor does it with up to 12,288 ranks" in refused(base, 1536, 2.3)


def test_on_the_machine_that_is_asked_for():
    """A config for CPUs is judged as one for the GPUs that it is planned for, also where they have what CPUs lack."""
    parallel = {"dp": 4, "tp": 2, "async_tp": True, "sequence_parallel": True}
    machine = H100.model_copy(update={"memory_gib": 40.0})
    on_cpu, on_any = (
        what_helps(config(precision={"dtype": "bf16"}, parallel=parallel, train={"device": device}), 8, machine, None)
        for device in ("cpu", "auto")
    )
    assert on_cpu == on_any
    assert "it would with" in on_cpu


def test_of_ones_own_layout():
    """Each that is said makes it fit by itself, and the others do not."""
    base = config(precision={"dtype": "bf16"}, parallel={"dp": 8, "zero_stage": 1})
    base = Change((("batch", "micro_batch_size", 4),)).applied_to(base)
    machine = H100.model_copy(update={"memory_gib": 96.0})
    assert not estimate(base, 8, machine).fits
    said = what_helps(base, 8, machine, None)
    for change in (
        Change((("train", "recompute", "full"),)),
        Change((("batch", "micro_batch_size", 1),)),
        EIGHT_BITS,
        OFFLOADED,
    ):
        assert (str(change) in said) == estimate(change.applied_to(base), 8, machine).fits, change
    assert "it would with " in said
    assert said.endswith("without --as-is other layouts are looked at")


@pytest.mark.parametrize("dp", [None, 4])
def test_more_ranks_of_ones_own_layout(dp: int | None):
    """The fewest on which ZeRO has divided enough are said, with the dp that a config names; none where nothing is
    divided."""
    base = Change((("batch", "micro_batch_size", 1),)).applied_to(
        config(precision={"dtype": "bf16"}, parallel={"dp": dp, "zero_stage": 1})
    )
    machine = H100.model_copy(update={"memory_gib": 90.0})
    fitting = [
        ranks
        for ranks in (4, 8, 16, 32)
        if estimate(Change((("parallel", "dp", ranks),)).applied_to(base), ranks, machine).fits
    ]
    assert 4 < fitting[0] < 32
    more = f" parallel.dp={fitting[0]}" if dp else ""
    assert f"it would with --world-size {fitting[0]}{more}, " in what_helps(base, 4, machine, None)
    alone = Change((("parallel", "zero_stage", 0),)).applied_to(base)
    assert "--world-size" not in what_helps(alone, 4, machine, None)
