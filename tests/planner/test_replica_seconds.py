"""Seconds of what replicas send each other and copy for it, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from megalite.config.plan import make_plan
from megalite.config.schema import Config
from megalite.planner import replica_seconds
from megalite.planner.links import rate_over
from megalite.planner.machines import Machine
from megalite.planner.practice import OURS, Practice
from megalite.planner.replica_seconds import COPY_RATE
from megalite.planner.replica_traffic import bytes_by_stage
from megalite.planner.seconds import step_time
from tests.planner.test_seconds import H100, MODEL, changed, config_of, time_of


def test_divided_weights_are_copied(monkeypatch):
    """What is gathered is copied out for each pass of a micro-batch, and gradients in, in the format of the wire;
    nothing hides that. Messages of a whole step are hidden here. A CPU copies its own rows too, and adds
    gradients up."""
    monkeypatch.setattr(replica_seconds, "HOP_SECONDS", 0.0)
    monkeypatch.setattr(replica_seconds, "VISIBLE", 0.0)
    divided = {"zero_stage": 3, "engine": "fsdp2"}
    inner, outer = 32 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096), 2 * 32000 * 4096 + 4096

    def copied(practice: Practice = OURS, machine: Machine = H100, **precision: Any) -> float:
        seconds = time_of(8, machine=machine, practice=practice, parallel=divided, precision=precision).parts["dp"]
        return seconds * H100.memory_bandwidth * COPY_RATE / 8  # micro-batches

    out = 4 * (2 * inner + outer)  # bf16 read and written; what is outside of blocks once
    assert copied() == pytest.approx(out + (2 + 4) * (inner + outer))  # bf16 read, fp32 written
    assert copied(reduce_dtype="bf16") == pytest.approx(out + (2 + 2) * (inner + outer))
    assert copied(Practice(copied_bytes=5.0)) == pytest.approx(5.0 * (inner + outer))
    beside_nothing = changed(hides_messages=False, link=1e30, network=1e30)
    own, added_up = (4 + 2) / 8 * (2 * inner + outer), (4 + 4 / 8) * (inner + outer)
    assert copied(machine=beside_nothing) == pytest.approx(out + own + (2 + 4) * (inner + outer) + added_up)
    assert time_of(8).parts["dp"] == 0.0  # weights that stay whole are not copied


def test_gradients_travel_in_the_format_that_is_asked_for(monkeypatch):
    """fp32, or what the config says; with DeepSpeed's stage 2 that of the weights."""
    monkeypatch.setattr(replica_seconds, "HOP_SECONDS", 0.0)
    open_to_see = H100.model_copy(update={"hides_messages": False})

    def sent(stage: int, engine: str, **precision: Any) -> float:
        parallel = {"zero_stage": stage, "engine": engine}
        return time_of(8, open_to_see, parallel=parallel, precision=precision).parts["dp"]

    plain, halved = sent(1, "native"), sent(1, "native", reduce_dtype="bf16")
    assert halved / plain == pytest.approx((2 + 2) / (4 + 2))  # and weights in bf16
    assert sent(0, "native") / plain == pytest.approx((4 + 4) / (4 + 2))  # sums for everybody
    assert sent(2, "deepspeed") / plain == pytest.approx((8 * 2 + 2) / (4 + 2))  # of each of eight micro-batches


SENDING: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"zero_stage": 0}, {}),
    ({"zero_stage": 1}, {"reduce_dtype": "bf16"}),
    ({"zero_stage": 2, "engine": "deepspeed"}, {}),
    ({"zero_stage": 3, "engine": "deepspeed"}, {}),
    ({"zero_stage": 3, "engine": "fsdp2"}, {"gather_bits": 8}),
    ({"zero_stage": 3, "engine": "fsdp2", "dp_replicate": 2}, {}),
    ({"zero_stage": 3, "engine": "fsdp2", "hpz_size": 4}, {"reduce_bits": 4}),
    ({"zero_stage": 1, "reduce_within": 4}, {"reduce_bits": 8}),
)


@pytest.mark.parametrize(("parallel", "precision"), SENDING)
def test_seconds_are_those_of_the_bytes_that_travel(monkeypatch, parallel: dict, precision: dict):
    """Within a node everything has one rate: what `replica_traffic` counts, which real collectives confirm."""
    monkeypatch.setattr(replica_seconds, "HOP_SECONDS", 0.0)
    monkeypatch.setattr(replica_seconds, "COPY_RATE", float("inf"))
    batch = {"micro_batch_size": 1, "global_batch_size": 64, "seq_len": 4096}
    config = Config(model=MODEL, batch=batch, train={"steps": 1}, parallel=parallel, precision=precision)
    plan, machine = make_plan(config, 8), H100.model_copy(update={"hides_messages": False})
    found = step_time(config, plan, machine).parts["dp"]
    (sent,) = bytes_by_stage(config, plan)
    assert found == pytest.approx(sent.total / (machine.link * machine.constants.links))


@pytest.mark.parametrize(
    ("parallel", "precision", "times"),
    [
        ({"zero_stage": 0}, {}, 1),
        ({"zero_stage": 1}, {}, 2),
        ({"zero_stage": 1}, {"reduce_bits": 8, "gather_bits": 8}, 1.5),  # an all-to-all, and a gather of as much
        ({"zero_stage": 2, "engine": "deepspeed"}, {}, 2),
        ({"zero_stage": 3, "engine": "fsdp2"}, {}, 2),
    ],
)
def test_gathers_and_scatters_have_a_rate_of_their_own(monkeypatch, parallel: dict, precision: dict, times: float):
    """On GPUs those of every engine, which are the same of NCCL's; sums of all have that of links. On CPUs those of
    weights that are divided, alone."""
    monkeypatch.setattr(replica_seconds, "HOP_SECONDS", 0.0)
    monkeypatch.setattr(replica_seconds, "COPY_RATE", float("inf"))
    layout, unhidden = {"parallel": parallel, "precision": precision}, Practice(hides_reductions=False)

    def sent(practice: Practice = OURS, **numbers: Any) -> float:
        return time_of(8, changed(**numbers), practice, **layout).parts["dp"]

    assert sent(unhidden, halves=0.5) / sent(unhidden) == pytest.approx(times, rel=0.01)
    on_cpus = sent(hides_messages=False, halves=0.5) / sent(hides_messages=False)
    assert on_cpus == pytest.approx(2 if parallel["zero_stage"] == 3 else 1)


def test_rings_over_nodes_have_every_adapter_of_theirs(monkeypatch):
    """A sum over whole nodes goes through as many adapters as it has ranks in each, up to what links carry; tp leaves
    it fewer, and a pipeline's message has one."""
    monkeypatch.setattr(replica_seconds, "HOP_SECONDS", 0.0)
    quick = changed(constants=H100.constants.model_copy(update={"overhead": 1e-12}), network=10e9)
    unhidden = Practice(hides_reductions=False)

    def sent(ranks: int, **parallel: Any) -> float:
        settings = {"parallel": {"zero_stage": 0, **parallel}}
        return time_of(ranks, quick, practice=unhidden, **settings).parts["dp"]

    within = sent(8)
    assert sent(16) / within == pytest.approx((15 / 16) / (7 / 8) * H100.link / 80e9)
    fast = quick.model_copy(update={"network": 200e9})  # eight of them are more than the links
    settings = {"parallel": {"zero_stage": 0}}
    over = time_of(16, fast, practice=unhidden, **settings).parts["dp"]
    assert over / within == pytest.approx((15 / 16) / (7 / 8))
    alone, divided = sent(16), sent(64, tp=4)  # a quarter of the weights, and two rings for eight
    assert divided / alone == pytest.approx(1.0, rel=0.01)  # norms are not cut
    plan = make_plan(config_of(parallel={"pp": 2, "tp": 8}), 16)
    assert rate_over(plan, fast, "pp") / rate_over(plan, quick, "pp") == pytest.approx(20.0)


def test_copies_of_divided_weights(monkeypatch):
    """Within a node weights and gradients have the links; each rank's sums over the copies go through its own adapter.
    A message waits for the ranks of its ring, no others."""
    monkeypatch.setattr(replica_seconds, "COPY_RATE", float("inf"))
    parallel = {"zero_stage": 3, "engine": "fsdp2", "dp_replicate": 4}
    batch = {"micro_batch_size": 1, "global_batch_size": 64, "seq_len": 4096}
    base = Config(model=MODEL, batch=batch, train={"steps": 1}, parallel=parallel)
    plan, machine = make_plan(base, 32), changed(hides_messages=False, network=10e9, halves=1.0)
    found = step_time(base, plan, machine).parts["dp"]
    monkeypatch.setattr(replica_seconds, "HOP_SECONDS", 0.0)
    without = step_time(base, plan, machine).parts["dp"]
    (sent,) = bytes_by_stage(base, plan)
    near, far = sent.total - sent.between, sent.between
    assert far / (far + sent.reduced) == pytest.approx((2 * 3 / 4 / 8) / (2 * 3 / 4 / 8 + 7 / 8))
    assert without == pytest.approx((near / machine.link + far / 10e9) / machine.constants.links)
    assert found - without == pytest.approx(2 * MODEL["num_layers"] * (3 * 7 + 2 * 3) * 5e-6)


def test_replicas_within_a_node_do_not_feel_the_network():
    """A pipeline over nodes, each of which has all replicas of a stage."""
    parallel = {"pp": 2, "dp": 8}
    quick, slow = (time_of(16, changed(network=rate), parallel=parallel).parts for rate in (50e9, 1e6))
    assert quick["dp"] == slow["dp"]
    assert slow["pp"] > 1000 * quick["pp"]  # some of it is behind passes
