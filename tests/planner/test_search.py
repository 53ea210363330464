"""The search against judging every layout, its bounds, and what it says where nothing fits."""

from __future__ import annotations

import time
from typing import Any

import pytest

from megalite.config.fill import fill_model
from megalite.config.load import dump_config, load_config
from megalite.config.plan import make_plan
from megalite.config.schema import ADAPTED, Config, OptimizerConfig
from megalite.config.validate import validate
from megalite.errors import ConfigError, UserError
from megalite.planner.estimate import TAKEN_BYTES, USABLE, USABLE_OF_HOST, Estimate, estimate
from megalite.planner.layouts import Candidate, first_blocks, layouts
from megalite.planner.machines import Machine, load_machine
from megalite.planner.memory import memory_by_stage, on_device
from megalite.planner.nearest import refusal
from megalite.planner.practice import OURS, Practice
from megalite.planner.published import BEFORE_FLASH
from megalite.planner.search import EQUAL, Quickest, search
from megalite.planner.seconds import step_time
from tests.kit.layouts import best_of_all

H100 = load_machine("h100-sxm")


def config(batch: int = 32, seq_len: int = 4096, precision: dict[str, Any] | None = None, **model: Any) -> Config:
    sizes = {"hidden_size": 2048, "num_layers": 8, "num_heads": 16, "ffn_hidden_size": 5632, "vocab_size": 32000}
    return Config(model={**sizes, **model}, batch={"global_batch_size": batch, "seq_len": seq_len}, train={"steps": 1})


def best(base: Config, world_size: int, machine: Machine) -> list[Estimate]:
    """Of a search, or the refusal."""
    found = search(base, world_size, machine, top=1)
    if not found.best:
        raise refusal(found, base, world_size, machine, None)
    return list(found.best)


MODELS = {
    "dense": config(),
    "long": config(batch=8, seq_len=16384, num_layers=4),
    "experts": config(moe={"num_experts": 8, "ffn_hidden_size": 2048}, num_layers=4),
    "further": config(mtp={"num_layers": 1}, num_layers=4, vocab_size=128000),
    "frozen below": config(batch=64, seq_len=16384, num_layers=4).model_copy(
        update={"optimizer": OptimizerConfig(groups=[{"match": ["embedding.*", "blocks.[012].*"], "frozen": True}])}
    ),
    "adapters above": config(batch=4, num_layers=4, lora={"rank": 8}).model_copy(
        update={"optimizer": OptimizerConfig(groups=[{"match": ["blocks.[012].*"], "frozen": True}, ADAPTED])}
    ),
    "few micro-batches of uneven stages": config(batch=4, seq_len=8192, num_layers=5, vocab_size=128000),
    "stages of unlike sizes": config(batch=48, hidden_size=1024, num_layers=6, vocab_size=256000, seq_len=8192),
    "offloaded": config().model_copy(update={"optimizer": OptimizerConfig(offload=True)}),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_search_finds_the_best_of_all(name: str):
    """Judged one by one, every legal layout of eight ranks: of each mesh the leanest of those that are as quick as its
    quickest, and of these the quickest six. No layout is quicker or smaller than its bounds."""
    base, machine = MODELS[name], H100.model_copy(update={"memory_gib": 24.0})
    expected = best_of_all(base, 8, machine, OURS, top=6)
    assert len(expected) == 6
    best = search(base, 8, machine, top=6).best
    assert [each.seconds for each in best] == pytest.approx(sorted(each.seconds for each in expected))
    assert {max(each.memory) for each in best} == {max(each.memory) for each in expected}


def test_no_more_blocks_are_made_again_than_have_to_be():
    """Where a layout just does not fit: with one block less it would not, and all of its blocks would take longer."""
    base = config(batch=64, num_layers=32)
    plain = base.model_copy(update={"parallel": base.parallel.model_copy(update={"sequence_parallel": False})})
    needed = max(estimate(plain, 8, H100).memory)
    machine = H100.model_copy(update={"memory_gib": (0.9 * needed + TAKEN_BYTES) / USABLE / 2**30})
    (found,) = (
        each
        for each in search(plain, 8, machine, top=9).best
        if not any(name in override for override in each.overrides for name in ("pp=", "tp=", "cp=", "zero_stage"))
    )
    (rules,) = (override for override in found.overrides if "recompute_layers" in override)
    count = int(rules.split("first: ")[1].rstrip("}]"))

    def with_again(count: int) -> Estimate:
        train = plain.train.model_copy(update={"recompute_layers": first_blocks(count)})
        return estimate(plain.model_copy(update={"train": train}), 8, machine)

    assert with_again(count).seconds == pytest.approx(found.seconds)
    assert with_again(count).fits
    assert not with_again(count - 1).fits
    assert with_again(count + 1).seconds > found.seconds


def test_stages_of_unlike_sizes_make_all_but_one_again():
    """The fullest has more blocks than the mean: so many are tried."""
    base = config(batch=16, num_layers=16, vocab_size=256000)
    layout = {"pp": 4, "dp": 1, "tp": 1, "sequence_parallel": False, "schedule": "1f1b", "engine": "native"}

    def of(count: int) -> Config:
        train = base.train.model_copy(update={"recompute_layers": first_blocks(count)})
        return base.model_copy(update={"parallel": Config(parallel=layout).parallel, "train": train})

    blocks = [len(make_plan(of(0), 4).blocks_of(stage)) for stage in range(4)]
    most = max(blocks) - 1
    assert most > base.model.num_layers // 4 - 1
    needed = max(estimate(of(most), 4, H100).memory)
    assert needed < max(estimate(of(most - 1), 4, H100).memory)
    machine = H100.model_copy(update={"memory_gib": (needed + TAKEN_BYTES + 1) / USABLE / 2**30})
    expected, found = best_of_all(base, 4, machine, OURS, top=9), search(base, 4, machine, top=9).best
    assert sorted(each.seconds for each in found) == pytest.approx(sorted(each.seconds for each in expected))


def test_one_sequence_at_a_time_is_enough(monkeypatch: pytest.MonkeyPatch):
    """Where weights are whole: with some blocks made again of larger micro-batches, too, nothing is quicker."""
    for base in (config(batch=64, num_layers=32), config(batch=64, seq_len=1024, num_layers=32)):
        needed = 0.9 * max(estimate(base, 8, H100).memory) + TAKEN_BYTES
        machine = H100.model_copy(update={"memory_gib": needed / USABLE / 2**30})
        found = search(base, 8, machine, top=9).best
        assert any("recompute_layers" in override for each in found for override in each.overrides)
        with monkeypatch.context() as patched:
            patched.setattr(Candidate, "may_make_some_again", property(lambda each: each.recompute == "none"))
            of_all = search(base, 8, machine, top=9).best
        assert [each.seconds for each in found] == pytest.approx([each.seconds for each in of_all], rel=EQUAL)


def test_the_leanest_of_those_that_are_as_quick():
    """Whichever comes first, and however near to what others take."""

    def layout(seconds: float, memory: int) -> Estimate:
        return Estimate((), seconds, 1.0, 0.5, (memory,), (0,), True, {})

    one, other = (1, 1, 1, 1, 8, False), (2, 1, 1, 1, 4, False)
    best = Quickest(1)
    best.add(one, layout(1.0, 50))
    assert best.limit_of(other) == pytest.approx(1.0 * (1 + EQUAL))
    for seconds, memory in ((1.002, 10), (0.999, 90), (1.1, 1)):
        if seconds < best.limit_of(other):
            best.add(other, layout(seconds, memory))
    best.add(other, None)
    (chosen,) = best.chosen()
    assert (chosen.seconds, chosen.memory) == (1.002, (10,))


def test_weights_are_divided_among_some_nodes():
    """Hybrid sharding: of small batches on many ranks, where a message to all of them takes longest, the quickest of
    all; and none on a single node."""
    base = Config(
        model={"hidden_size": 4096, "num_layers": 4, "num_heads": 1, "ffn_hidden_size": 11008, "vocab_size": 32000},
        batch={"global_batch_size": 512, "seq_len": 2048},
        train={"steps": 1},
    )
    scarce = H100.model_copy(update={"memory_gib": 16.0})
    expected = best_of_all(base, 512, scarce, OURS, top=3)
    found = search(base, 512, scarce, top=3).best
    assert [each.seconds for each in found] == pytest.approx(sorted(each.seconds for each in expected))
    assert any("parallel.dp_replicate" in override for each in found for override in each.overrides)
    alone = search(base, 8, H100, top=3).best
    assert alone
    assert not any("dp_replicate" in override for each in alone for override in each.overrides)


def test_few_sequences_are_cut():
    """Of eight sequences on 128 ranks few have one of their own."""
    found = search(config(batch=8, num_layers=16), 128, H100, top=3).best
    assert found
    assert all("parallel.cp=2" in each.overrides for each in found)


def test_a_node_has_so_much_memory_beside_its_devices():
    """What waits there has to fit, and is said."""
    base = config(num_layers=32, seq_len=32768, batch=8)
    machine = H100.model_copy(update={"memory_gib": 24.0})
    found = search(base, 8, machine, top=6).best
    offloaded = [each for each in found if any(each.host)]
    assert offloaded
    gib = max(max(each.host) for each in offloaded) * 8 / 2**30
    scarce = machine.model_copy(update={"host_memory_gib": min(max(e.host) for e in offloaded) * 8 / 2**30})
    assert not any(any(each.host) for each in search(base, 8, scarce, top=6).best)
    enough = machine.model_copy(update={"host_memory_gib": gib / USABLE_OF_HOST + 0.1})
    assert [each.host for each in search(base, 8, enough, top=6).best] == [each.host for each in found]
    (one,) = offloaded[:1]
    applied = one_of(base, one)
    assert estimate(applied, 8, machine).fits
    assert not estimate(applied, 8, scarce).fits


def one_of(base: Config, found: Estimate) -> Config:
    """The config of a layout."""
    layouts_of_it = (
        each.applied_to(base)
        for each in layouts(base, fill_model(base.model, base.batch, None), 8, H100, OURS)
        if each.overrides(base) == found.overrides
    )
    return next(layouts_of_it)


def test_overrides_make_the_layout(tmp_path):
    """What is printed, given to the command line, is judged the same."""
    base, path = MODELS["experts"], tmp_path / "run.yaml"
    path.write_text(dump_config(base))
    for each in search(base, 8, H100, top=5).best:
        loaded = load_config(path, each.overrides)
        validate(loaded, 8)
        plan = make_plan(loaded, 8)
        assert step_time(loaded, plan, H100).seconds == pytest.approx(each.seconds)
        assert tuple(stage.total for stage in memory_by_stage(loaded, plan)) == each.memory


def test_nothing_fits():
    """The smallest is named, with what would help; so is a world that no layout is legal on."""
    huge = config(hidden_size=16384, num_heads=128, num_layers=96, ffn_hidden_size=65536, batch=512)
    with pytest.raises(
        UserError, match=r"no layout fits: the smallest takes \d+\.\d GiB of a rank \(.*parallel\."
    ) as error:
        best(huge, 8, H100)
    assert "it fits with --world-size" in str(error.value)
    with pytest.raises(UserError, match="no layout is legal on so many ranks"):
        best(config(batch=8), 7 * 11, H100)


@pytest.mark.parametrize(("engine", "practice"), [("fsdp2", OURS), ("deepspeed", BEFORE_FLASH)])
def test_what_is_known_not_to_fit(engine: str, practice: Practice):
    """530B at ZeRO-3 on 560 A100 of 80 GB, four sequences at a time (Narayanan et al. 2021, section 5.2): by FSDP2, and
    by DeepSpeed with what that run had, whose attention wrote its scores and had dropout."""
    gpt = {"hidden_size": 20480, "num_layers": 105, "num_heads": 128, "ffn_hidden_size": 81920, "vocab_size": 51200}
    model = {**gpt, "activation": "gelu", "norm": "layernorm", "bias": "all", "dropout": 0.1}
    sizes = {"micro_batch_size": 4, "global_batch_size": 2240, "seq_len": 2048}
    base = Config(
        model=model, batch=sizes, train={"steps": 1, "recompute": "full"}, parallel={"zero_stage": 3, "engine": engine}
    )
    assert not estimate(base, 560, load_machine("a100-80g"), practice=practice).fits


@pytest.mark.parametrize(
    ("model", "batch", "ranks", "seconds"),
    [
        ({"preset": "llama-70b"}, {"global_batch_size": 1024, "seq_len": 8192}, 512, 5.0),
        (
            {
                "hidden_size": 25600,
                "num_layers": 128,
                "num_heads": 160,
                "ffn_hidden_size": 102400,
                "activation": "gelu",
            },
            {"global_batch_size": 4096, "seq_len": 2048},
            16384,
            20.0,
        ),
    ],
    ids=["70B on 512", "1T on 16,384"],
)
def test_large_searches_are_quick(model: dict, batch: dict, ranks: int, seconds: float):
    """By the process' own clock."""
    base = Config(model={"vocab_size": 51200, **model}, batch=batch, train={"steps": 1})
    begin = time.process_time()
    found = search(base, ranks, H100, top=10)
    assert time.process_time() - begin < seconds
    assert len(found.best) >= 9  # of 1T no more meshes fit


def test_sequences_that_tp_cannot_divide_are_not_divided():
    """Tensor parallelism without sequence parallelism is a layout too."""
    odd = Config(
        model={"hidden_size": 8192, "num_layers": 8, "num_heads": 64, "ffn_hidden_size": 28672, "vocab_size": 32000},
        batch={"seq_len": 4095, "micro_batch_size": 1, "global_batch_size": 1},
        train={"steps": 1},
    )
    found = search(odd, 8, H100, top=3).best
    assert found
    assert all("parallel.sequence_parallel=true" not in each.overrides for each in found)


def test_the_smallest_is_said_where_none_fits():
    """Among all that are legal, however much a bound leaves out."""
    small = H100.model_copy(update={"memory_gib": 20.0})
    base = Config(model={"preset": "llama-70b"}, batch={"seq_len": 2048, "global_batch_size": 16}, train={"steps": 1})
    with pytest.raises(UserError, match=r"the smallest takes (\d+\.\d) GiB of a rank .*, and 16.0 can be used") as told:
        best(base, 8, small)
    said = float(str(told.value).split("takes ")[1].split()[0])
    model = fill_model(base.model, base.batch, None)
    tried = [layout.applied_to(base) for layout in layouts(base, model, 8, small, OURS)]
    memory = []
    for config in tried:
        try:
            validate(config, 8)
        except ConfigError:
            continue
        memory.append(max(each.total for each in memory_by_stage(on_device(config, "cuda"), make_plan(config, 8))))
    assert said == pytest.approx(min(memory) / 2**30, rel=0.1)


def test_its_own_layout_does_not_matter():
    """A config that cuts sequences in another way, or not at all, has the same best layouts."""
    found = []
    for parallel in ({}, {"cp": 2, "cp_kind": "ring"}, {"cp": 2, "cp_kind": "ulysses"}, {"tp": 4, "pp": 2}):
        base = MODELS["dense"].model_copy(update={"parallel": Config(parallel=parallel).parallel})
        best = search(base, 8, H100, top=1).best[0]
        found.append((best.seconds, best.memory))
    assert found == [found[0]] * len(found)
