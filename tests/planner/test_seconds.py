"""Seconds of a step against sums made by hand, and how they follow machines and layouts."""

from __future__ import annotations

from math import ceil
from typing import Any

import pytest

from megalite.config.pipeline import pipeline_schedule
from megalite.config.plan import LOSS_CHUNK_TOKENS, make_plan
from megalite.config.schema import Config
from megalite.parallel.schedules.files import write_schedule
from megalite.planner import replica_seconds
from megalite.planner.machines import ATTENTION_RATE, Constants, Machine, load_machine
from megalite.planner.practice import OURS, Practice
from megalite.planner.seconds import ATTENTION_BACKWARD, StepTime, step_time, step_time_below, step_timeline
from megalite.planner.traffic import traffic_by_stage

H100 = load_machine("h100-sxm")
MODEL = {"hidden_size": 4096, "num_layers": 32, "num_heads": 32, "ffn_hidden_size": 11008, "vocab_size": 32000}


def test_a_limit_ends_the_count():
    """Below it nothing differs; at it, or above what is known before all is, there is no answer."""
    for layout in ({}, {"pp": 2, "schedule": "1f1b"}):
        base = Config(
            model={"hidden_size": 512, "num_layers": 4, "num_heads": 8, "ffn_hidden_size": 1408, "vocab_size": 32000},
            parallel=layout,
            batch={"global_batch_size": 8, "micro_batch_size": 1, "seq_len": 2048},
            train={"steps": 1},
        )
        plan, machine = make_plan(base, 2), load_machine("h100-sxm")
        found = step_time(base, plan, machine)
        assert step_time_below(1.001 * found.seconds, base, plan, machine) == found
        for share in (0.999, 0.5):
            assert step_time_below(share * found.seconds, base, plan, machine) is None


def config_of(**sections: Any) -> Config:
    batch = {"micro_batch_size": 1, "global_batch_size": 64, "seq_len": 4096, **sections.pop("batch", {})}
    model = {**MODEL, **sections.pop("model", {})}
    train = {"steps": 1, **sections.pop("train", {})}
    return Config(model=model, batch=batch, train=train, **sections)


def time_of(world_size: int = 1, machine: Machine = H100, practice: Practice = OURS, **sections: Any) -> StepTime:
    config = config_of(**sections)
    return step_time(config, make_plan(config, world_size), machine, practice)


def changed(**numbers: Any) -> Machine:
    return H100.model_copy(update=numbers)


def test_products_by_hand():
    """Six FLOPs a weight and token at the rate of large products, and what is read and written at the memory's."""
    found = time_of()
    tokens, h, f = 64 * 4096, 4096, 11008
    weights = 4 * h * h + 3 * h * f
    flops = 6 * tokens * (32 * weights + 32000 * h)
    numbers = 8 * h + 3 * f  # into and out of four products; queries, keys and values are one, gate and up as well
    moved = 3 * 32 * 2 * (tokens * numbers + 64 * weights)
    expected = flops / (989.4e12 * H100.constants.products) + moved / H100.memory_bandwidth
    assert found.parts["products"] == pytest.approx(expected)


def frozen(*patterns: str) -> dict[str, Any]:
    return {"optimizer": {"groups": [{"match": [*patterns], "frozen": True}]}}


def test_frozen_weights():
    """Where nothing is trained below there is no backward pass; a frozen weight above it has no gradient of its own."""
    parts, head = time_of().parts, 6 * 64 * 4096 * 4096 * 32000 / (989.4e12 * H100.constants.products)
    of_blocks = parts["products"] - head
    still = time_of(**frozen("embedding.*", "blocks.*")).parts
    assert still["products"] == pytest.approx(of_blocks / 3 + head)
    assert still["attention"] == pytest.approx(parts["attention"] / (1 + ATTENTION_BACKWARD))
    half = time_of(**frozen("embedding.*", "blocks.?.*", "blocks.1[0-5].*")).parts
    assert half["products"] == pytest.approx(of_blocks * (1 / 2 + 1 / 6) + head)
    mixed = time_of(**frozen("blocks.*.mlp.*", "head.*")).parts  # whose gradients go on down to the embedding
    share = 4 * 4096 / (4 * 4096 + 3 * 11008)
    assert mixed["products"] == pytest.approx(of_blocks * (2 + share) / 3 + head * 2 / 3)
    made_all_the_same = {"parallel": {"zero_stage": 2, "engine": "deepspeed"}}
    assert time_of(**frozen("blocks.*"), **made_all_the_same).parts["products"] == parts["products"]


def test_experts_by_hand():
    """FLOPs of a token's own experts and of the router, and all experts' matrices read, an ep rank's share of them."""
    moe = {"num_experts": 64, "top_k": 4, "ffn_hidden_size": 1408}
    sizes = {"model": {"moe": moe, "vocab_size": 2}, "batch": {"global_batch_size": 64}}
    tokens, h, f = 4096, 4096, 1408
    dense, expert, router = 4 * h * h, 3 * h * f, 64 * h
    flops = 6 * tokens * (32 * (dense + 4 * expert + router) + 2 * h) / (989.4e12 * H100.constants.products)
    numbers = 5 * h + 4 * (2 * h + 3 * f) + h  # a token's, as above, of four experts
    for ep in (1, 8):
        weights = dense + router + 64 // ep * expert
        moved = 3 * 32 * 2 * (tokens * numbers + weights) / H100.memory_bandwidth
        parts = time_of(64, parallel={"ep": ep, "dp": 64}, **sizes).parts
        assert parts["products"] == pytest.approx(flops + moved, rel=1e-3), ep


def test_scores_that_are_written():
    """Six passes over them forward, nine backward, by another software's kernels."""
    unfused, plain = time_of(practice=Practice(fused_attention=False)), time_of()
    scores = 32 * 64 * 4096 * 4096 * 32 * 2 / (H100.memory_bandwidth * H100.constants.passes)
    assert unfused.parts["passes"] - plain.parts["passes"] == pytest.approx(15 * scores)


def test_attention_by_hand():
    """Causal, forward and two and a half times that backward."""
    tokens, span = 64 * 4096, 4096 / 2
    flops = (1 + ATTENTION_BACKWARD) * 32 * tokens * 2 * 2 * 4096 * span
    seconds = flops / (989.4e12 * H100.constants.products)
    assert time_of().parts["attention"] == pytest.approx(seconds / ATTENTION_RATE)
    slower = H100.model_copy(update={"attention": 0.4})
    assert time_of(machine=slower).parts["attention"] == pytest.approx(seconds / 0.4)


def test_parts_add_up():
    """For every kind of layout the parts are the whole, and none is negative."""
    experts = {"moe": {"num_experts": 8, "ffn_hidden_size": 4096}}
    for world, parallel, model in (
        (1, {}, {}),
        (8, {"tp": 8, "sequence_parallel": True}, {}),
        (16, {"pp": 4, "tp": 4, "schedule": "zb-v", "chunks": 2}, {}),
        (64, {"tp": 2, "cp": 2, "pp": 2, "schedule": "interleaved", "chunks": 4}, {}),
        (16, {"zero_stage": 3, "engine": "fsdp2"}, {}),
        (16, {"ep": 8}, experts),
    ):
        found = time_of(world, parallel=parallel, model=model)
        assert sum(found.parts.values()) == pytest.approx(found.seconds)
        assert min(found.parts.values()) >= 0.0, (parallel, found.parts)


@pytest.mark.parametrize("count", [8, 32, 128])
def test_the_bubble_of_1f1b(count: int):
    """(p - 1) / m of the work, whatever the number of micro-batches that is simulated."""
    parallel = {"pp": 4, "blocks_per_stage": [8, 8, 8, 8]}
    machine = changed(network=1e18, link=1e18)
    found = time_of(4, machine, parallel=parallel, model={"vocab_size": 2}, batch={"global_batch_size": count})
    work = sum(seconds for name, seconds in found.parts.items() if name not in ("bubble", "optimizer", "pp"))
    assert found.parts["bubble"] / work == pytest.approx(3 / count, rel=1e-3)


@pytest.mark.parametrize(("tp", "divides"), [(1, False), (4, False), (4, True)])
def test_stages_that_stand_still(tp: int, divides: bool):
    """Each pass of a stage ends with a message, a part of the stream from each rank of tp, which without sequence
    parallelism gather it: the last of all passes has waited for those of all micro-batches and stages, twice."""
    rate, link, overhead = 1e10, 1e11, H100.constants.overhead
    unit = H100.constants.model_copy(update={"links": 1.0})
    machine = changed(network=rate, link=link, ranks_per_node=tp, constants=unit)
    parallel = {"tp": tp, "pp": 4, "blocks_per_stage": [8, 8, 8, 8], "sequence_parallel": divides}
    model, batch = {"vocab_size": 8}, {"global_batch_size": 32}
    found = time_of(4 * tp, machine, Practice(waits_for_stages=True), parallel=parallel, model=model, batch=batch)
    stream = 2 * 4096 * 4096
    gather = 0.0 if tp == 1 or divides else 3 / 4 * stream / link + overhead
    stops = 2 * (32 + 3) * (stream / tp / rate + gather)
    assert found.parts["pp"] == pytest.approx(stops, rel=1e-3)
    as_long = machine if divides else machine.model_copy(update={"network": rate * tp})  # ranks send the whole stream
    ours = time_of(4 * tp, as_long, parallel=parallel, model=model, batch=batch)
    assert ours.parts["pp"] < found.parts["pp"]


@pytest.mark.parametrize("schedule", [{}, {"schedule": "interleaved", "chunks": 2}])
def test_ranks_of_tp_send_the_stream_that_they_hold(schedule: dict[str, Any]):
    """The whole of it each, unless sequence parallelism has cut it: over a quarter of the network's rate the cut one
    takes what the whole one does, in the plan and in the timeline; with the bytes that `traffic` counts."""
    sections = {"model": {"vocab_size": 8}, "batch": {"global_batch_size": 16}}
    unit = H100.constants.model_copy(update={"links": 1.0, "overhead": 0.0})

    def planned(divides: bool, network: float) -> tuple[float, float, int]:
        parallel = {"tp": 4, "pp": 4, "zero_stage": 0, "sequence_parallel": divides, **schedule}
        config = config_of(parallel=parallel, **sections)
        plan = make_plan(config, 16)
        machine = changed(ranks_per_node=4, network=network, link=1e18, constants=unit)
        alone = machine.model_copy(update={"network": 1e18})  # whose passes are those of the same layout
        seconds = step_time(config, plan, machine).parts["pp"], step_timeline(config, plan, machine).end
        return seconds[0], seconds[1] - step_timeline(config, plan, alone).end, traffic_by_stage(config, plan)[1].pp

    slow = 1e8  # so that messages hold passes up
    whole, cut = planned(divides=False, network=slow), planned(divides=True, network=slow / 4)
    assert whole[2] == 4 * cut[2]
    assert whole[:2] == pytest.approx(cut[:2], rel=0.02)  # norms are passes over a part of the tokens
    assert whole[0] > 2 * planned(divides=True, network=slow)[0]


def test_what_waits_in_the_hosts_memory_is_what_a_rank_holds():
    """Inputs of blocks, whole for each rank of tp without sequence parallelism."""
    train = {"recompute": "full", "offload_activations": True}

    def of_copies(divides: bool) -> float:
        """What half the rate of a link adds, so slow a one that work hides nothing of it."""
        layout = {"parallel": {"tp": 8, "sequence_parallel": divides}, "train": train}
        slow, slower = (time_of(8, changed(host_link=rate), **layout).parts["offload"] for rate in (2e7, 1e7))
        return slower - slow

    assert of_copies(False) == pytest.approx(8 * of_copies(True))


def test_copies_are_made_once_each_way():
    """An input's way out is behind the forward pass; its way back is behind that pass made again and the backward one,
    before which it begins."""
    unit, again = H100.constants.model_copy(update={"links": 1.0, "overhead": 0.0}), {"recompute": "full"}
    stream, count, parts = 2 * 4096 * 4096, 64 * 32, ("products", "attention", "passes")
    once, twice = (time_of(train=each, model={"vocab_size": 2}).parts for each in ({}, again))
    backward, forward = (sum(work[name] for name in parts) / count for work in (once, twice))
    forward -= backward  # the rest of one pass of each, which are in both
    backward -= forward

    def waited(copy: float) -> float:
        machine = changed(host_link=stream / copy, constants=unit)
        train = {**again, "offload_activations": True}
        return time_of(machine=machine, train=train, model={"vocab_size": 2}).parts["offload"] / count

    out = 1.5 * forward
    assert waited(out) == pytest.approx(out - forward, rel=1e-3)
    both = 2 * (forward + backward)
    assert waited(both) == pytest.approx(2 * both - 2 * forward - backward, rel=1e-3)


@pytest.mark.parametrize("network", [5e9, 400e9])
@pytest.mark.parametrize(
    "parallel",
    [
        {"pp": 4},
        {"pp": 16},
        {"pp": 16, "schedule": "interleaved", "chunks": 2},
        {"pp": 5, "schedule": "interleaved", "chunks": 3},
        {"pp": 8, "schedule": "zb-h1"},
        {"pp": 8, "schedule": "zb-v"},
        {"pp": 4, "schedule": "dualpipe-v"},
    ],
    ids=str,
)
def test_a_pipeline_takes_what_its_timeline_does(parallel: dict[str, Any], network: float):
    """All micro-batches simulated, over quick networks and slow ones: what comes between steps apart, to 1 %."""
    machine = changed(network=network, link=network, ranks_per_node=1)
    config = config_of(parallel={"zero_stage": 0, **parallel}, batch={"global_batch_size": 150})
    plan = make_plan(config, parallel["pp"])
    found = step_time(config, plan, machine)
    within = found.seconds - sum(found.parts.get(name, 0.0) for name in ("dp", "optimizer"))
    assert within == pytest.approx(step_timeline(config, plan, machine).end, rel=0.01)
    assert min(found.parts.values()) >= 0.0


def test_what_a_machine_changes():
    """Halving a rate doubles what goes at that rate, and nothing else."""
    layout = {"parallel": {"tp": 4, "dp": 2, "sequence_parallel": True}}
    waiting = H100.constants.model_copy(update={"overhead": 1.0})
    quick = changed(constants=H100.constants.model_copy(update={"overhead": 1e-12}))
    before = time_of(8, quick, **layout).parts
    slower = time_of(8, quick.model_copy(update={"link": H100.link / 2}), **layout).parts
    assert slower["tp"] == pytest.approx(2 * before["tp"])
    assert {name for name in before if slower[name] != before[name]} == {"tp", "dp"}
    across = time_of(8, quick.model_copy(update={"ranks_per_node": 2}), **layout).parts
    assert across["tp"] == pytest.approx(before["tp"] * H100.link / H100.network / 2)  # in two rings
    found = time_of(8, changed(constants=waiting, hides_messages=False), **layout).parts
    assert found["host"] == pytest.approx(32 * 32 * 3)  # a second for a block and for each message
    outside = 2 + 2 * ceil(config_of(**layout).batch.seq_len / LOSS_CHUNK_TOKENS["cpu"])  # sums of embedding and loss
    assert found["tp"] == pytest.approx(32 * (32 * 8 + outside), rel=1e-3)
    meeting = changed(constants=waiting, hides_messages=False, meeting=2.0)  # a sum is a scatter and a gather
    divided = {"parallel": {**layout["parallel"], "sequence_parallel": False}}
    for each in (layout, divided):
        assert time_of(8, meeting, **each).parts["tp"] == pytest.approx(32 * (32 * 16 + 4 * outside), rel=1e-3)
    assert "host" not in {name for name, seconds in time_of(8, changed(), **layout).parts.items() if seconds}
    ahead = time_of(8, changed(constants=waiting)).parts  # a GPU that waits for its host has all else done meanwhile
    assert sum(ahead[name] for name in ("host", "products", "attention", "passes")) == pytest.approx(
        3 * 32 * 8, rel=2e-3
    )
    recorded = time_of(
        8, changed(constants=waiting), train={"steps": 1, "cuda_graphs": True}
    ).parts  # it waits for none
    assert "host" not in {name for name, seconds in recorded.items() if seconds}
    behind_all = time_of(16, train={"steps": 1, "cuda_graphs": True}).parts["dp"]
    open_to_see = time_of(16, changed(hides_messages=False)).parts["dp"]
    assert open_to_see == behind_all == time_of(16, practice=Practice(hides_reductions=False)).parts["dp"]


def test_what_settings_change():
    """Full recomputation makes the blocks' forward passes again; FP8 halves large products; unhidden messages take
    their whole time."""
    plain, again = time_of().parts, time_of(train={"recompute": "full"}).parts
    head = 6 * 64 * 4096 * 32000 * 4096 / (989.4e12 * H100.constants.products)
    assert again["products"] - head == pytest.approx((plain["products"] - head) * 4 / 3)
    assert again["attention"] == pytest.approx(plain["attention"] * (2 + ATTENTION_BACKWARD) / (1 + ATTENTION_BACKWARD))
    fp8 = {"precision": {"fp8": {"backend": "scaled_mm"}}}
    assert 0.5 < time_of(**fp8).parts["products"] / plain["products"] < 0.6
    slow = changed(network=H100.network / 8)
    open_to_see, hidden = (
        time_of(16, slow, practice=Practice(hides_reductions=hides)).parts["dp"] for hides in (False, True)
    )
    passes = sum(plain[name] for name in ("products", "attention", "passes", "host")) / 64
    behind = 2 / 3 * passes + 1 / 3 * passes  # gradients behind the last backward pass, weights behind the next forward
    assert hidden == pytest.approx(open_to_see - behind)


def test_interleaving_by_another_name(tmp_path):
    """Chunks hide what replicas send by the order of their passes, which a file of one's own may have too."""
    parallel = {"tp": 8, "sequence_parallel": True, "pp": 4, "dp": 16, "chunks": 4}
    sections = {"batch": {"global_batch_size": 256, "seq_len": 4096}, "precision": {"dtype": "bf16"}}
    model = {"hidden_size": 8192, "num_layers": 32, "num_heads": 64, "ffn_hidden_size": 28672, "vocab_size": 32000}

    def config(schedule: str) -> Config:
        return Config(model=model, train={"steps": 1}, parallel={**parallel, "schedule": schedule}, **sections)

    named = config("interleaved")
    plan, path = make_plan(named, 512), tmp_path / "own.csv"
    path.write_text(write_schedule(pipeline_schedule(named, plan, plan.grad_accum_steps)))
    own = config(str(path))
    found = [step_time(each, make_plan(each, 512), H100).parts["dp"] for each in (named, own)]
    assert found[0] == pytest.approx(found[1])
    alone = replica_seconds._last_passes(named, plan)
    assert alone == (4 * 3 + 1) / 4 == replica_seconds._last_passes(own, make_plan(own, 512))


def test_constants_scale():
    """Twice the share of the peak, half the time of products and attention."""
    constants = Constants(**{**H100.constants.model_dump(), "products": H100.constants.products / 2})
    assert time_of(machine=changed(constants=constants)).parts["attention"] == pytest.approx(
        2 * time_of().parts["attention"]
    )


def test_emulated_fp8_multiplies_in_fp32():
    emulated = time_of(precision={"fp8": {"backend": "emulate"}}).parts["products"]
    assert emulated > 5 * time_of().parts["products"]
