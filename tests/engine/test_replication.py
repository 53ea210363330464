"""What replicas of the native engine send in a step, and when: by count, by the sockets, and by the clock."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megalite.engine.native import engine, replication
from megalite.engine.native.sums import GradientSums
from megalite.parallel import messages
from tests.kit.spawn import run_ranks
from tests.kit.train import start_rank, tiny_config

SMALL_BYTES = 256
"""A step's loss, norm and tokens: what is sent besides gradients and weights."""


def sent(parallel: dict[str, Any], dtype: str) -> tuple[Counter, int, int]:
    """Bytes that go through each kind of collective over replicas in a step, parameters, and numbers of padding."""
    counts: Counter = Counter()

    def counted(kind: str, function: Any, which: int) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            tensor = arguments[which]
            counts[kind] += tensor.numel() * tensor.element_size()
            return function(*arguments, **options)

        return call

    rank = start_rank(tiny_config(parallel=parallel, precision={"dtype": dtype}))
    rank.train(0, 1)
    rank.engine.held_weights()
    replication.fill_reduce_scatter = counted("reduce_scatter", replication.fill_reduce_scatter, 1)
    messages.fill_all_gather = counted("all_gather", messages.fill_all_gather, 0)
    dist.all_reduce = counted("all_reduce", dist.all_reduce, 0)
    rank.train(1, 2)
    rank.engine.held_weights()
    num_parameters = sum(parameter.numel() for parameter in rank.engine.stage.parameters())
    padding = sum(bucket.weights.numel() for bucket in rank.engine._buckets) - num_parameters
    return counts, num_parameters, padding


@pytest.mark.parametrize("dp", [2, 4])
@pytest.mark.parametrize(
    ("dtype", "gradient_bytes", "weight_bytes"), [("fp32", 4, 4), ("bf16", 4, 2)], ids=["fp32", "bf16"]
)
def test_bytes_of_zero_1(dp, dtype, gradient_bytes, weight_bytes):
    """Each number's gradient goes once through a reduce-scatter and its weight once through an all-gather, of which a
    rank sends (dp - 1) / dp; nothing else travels but a few numbers."""
    for counts, num_parameters, padding in run_ranks(sent, dp, {"dp": dp}, dtype):
        size = num_parameters + padding
        assert padding < 64 * dp
        assert counts["reduce_scatter"] == gradient_bytes * size
        assert counts["all_gather"] == weight_bytes * size
        assert counts["all_reduce"] <= SMALL_BYTES


def test_bytes_without_zero():
    """Gradients alone, in one all-reduce."""
    for counts, num_parameters, padding in run_ranks(sent, 2, {"dp": 2, "zero_stage": 0}, "fp32"):
        assert set(counts) == {"all_reduce"}
        assert 0 <= counts["all_reduce"] - 4 * (num_parameters + padding) <= SMALL_BYTES


def socket_bytes() -> int:
    """Sent by this process over TCP and received by others, since its sockets are there."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as each:
                if each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM:
                    told = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += int.from_bytes(told[ACKED : ACKED + 8], "little")
        except OSError:
            continue  # the folder's own, or not connected
    return total


ACKED = 120
"""Where `tcpi_bytes_acked` stands in the kernel's `tcp_info`."""
STEPS = 2
HEADERS = 0.05
"""Of the bytes: gloo's own words, and a step's loss, norm and tokens."""


def sent_over_sockets(cases: list[dict[str, Any]]) -> list[tuple[int, int, int]]:
    """Bytes that this rank has sent in some steps, parameters, and numbers of padding."""
    found = []
    for case in cases:
        rank = start_rank(tiny_config(**MANY_OF_FEW_TOKENS, **case))
        rank.train(0, 1)
        rank.engine.held_weights()
        dist.barrier()
        before = socket_bytes()
        rank.train(1, 1 + STEPS)
        rank.engine.held_weights()
        dist.barrier()
        sent = socket_bytes() - before
        num_parameters = sum(parameter.numel() for parameter in rank.engine.stage.parameters())
        found.append((sent, num_parameters, sum(each.weights.numel() for each in rank.engine._buckets)))
        rank.engine.close()
    return found


@pytest.mark.parametrize("dp", [2, 4])
def test_bytes_on_the_network(dp):
    """What the kernel counts on sockets is (dp - 1) / dp of the bytes of all gradients and weights, as is said."""
    fp32, bf16 = {"dtype": "fp32"}, {"dtype": "bf16"}
    cases = [
        (4 + 4, {"parallel": {"dp": dp, "zero_stage": 0}, "precision": fp32}),
        (4 + 4, {"parallel": {"dp": dp, "zero_stage": 1}, "precision": fp32}),
        (4 + 2, {"parallel": {"dp": dp, "zero_stage": 1}, "precision": bf16}),
        (2 + 2, {"parallel": {"dp": dp, "zero_stage": 1}, "precision": {**bf16, "reduce_dtype": "bf16"}}),
    ]
    for rank in run_ranks(sent_over_sockets, dp, [case for _, case in cases], backend="gloo"):
        for (number_bytes, case), (sent, num_parameters, num_padded) in zip(cases, rank, strict=True):
            assert num_padded < 1.01 * num_parameters
            expected = STEPS * number_bytes * num_padded * (dp - 1) / dp
            assert sent == pytest.approx(expected, rel=HEADERS), case


def sent_by_fsdp2() -> tuple[int, int, int]:
    """Bytes that this rank has sent in some steps of one micro-batch, parameters of the blocks, and all."""
    one = {"micro_batch_size": 8, "global_batch_size": 16, "seq_len": 8}
    parallel = {"dp": 2, "zero_stage": 3, "engine": "fsdp2"}
    rank = start_rank(tiny_config(model=MANY["model"], batch=one, parallel=parallel))
    rank.train(0, 1)
    dist.barrier()
    before = socket_bytes()
    rank.train(1, 1 + STEPS)
    dist.barrier()
    sent, named = socket_bytes() - before, list(rank.engine.stage.named_parameters())
    rank.engine.close()
    of_blocks = sum(parameter.numel() for name, parameter in named if name.startswith("blocks."))
    return sent, of_blocks, sum(parameter.numel() for _, parameter in named)


def test_bytes_of_fsdp2_on_the_network():
    """Blocks are gathered twice and all else once, gradients reduced once, each by half of its bytes."""
    for sent, of_blocks, everything in run_ranks(sent_by_fsdp2, 2, backend="gloo"):
        assert sent == pytest.approx(STEPS * 4 * (of_blocks + everything + everything) / 2, rel=HEADERS)


MANY = {
    "model": {"hidden_size": 256, "num_layers": 12, "num_heads": 4, "num_kv_heads": 4, "ffn_hidden_size": 704},
    "batch": {"micro_batch_size": 4, "global_batch_size": 16, "seq_len": 128},
}
MANY_OF_FEW_TOKENS = {**MANY, "batch": {**MANY["batch"], "seq_len": 8}}
"""Where bytes count, and no time: a step sends the same."""
BUCKET = 2**18
"""Numbers, so that this small model has dozens of buckets, as a large one has."""

Span = tuple[float, float]


class Watched:
    """A reduction under way, and what is waited for it."""

    def __init__(self, work: dist.Work, waits: list[Span]):
        self._work, self._waits = work, waits

    def wait(self) -> None:
        began = time.perf_counter()
        self._work.wait()
        self._waits.append((began, time.perf_counter()))


def reductions(zero_stage: int, bits: int | None) -> tuple[list[Span], list[Span], float]:
    """When each reduction of a step began and was done, when the backward pass stood still for one, and when it was
    over. By a clock that all processes of a machine share."""
    engine.BUCKET_NUMBERS = BUCKET
    precision = {"dtype": "fp32", "reduce_bits": bits}
    rank = start_rank(tiny_config(parallel={"dp": 2, "zero_stage": zero_stage}, precision=precision, **MANY))
    rank.train(0, 2)
    spans, waits = list[Span](), list[Span]()
    threads: list[threading.Thread] = []

    def traced(function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            began, work = time.perf_counter(), function(*arguments, **options)
            waits.append((began, time.perf_counter()))
            if options.get("async_op"):

                def watch() -> None:
                    work.wait()
                    spans.append((began, time.perf_counter()))

                threads.append(threading.Thread(target=watch))
                threads[-1].start()
                return Watched(work, waits)
            return work

        return call

    finish, ends = GradientSums.finish, []

    def finished(self: GradientSums) -> None:
        ends.append(time.perf_counter())
        finish(self)

    GradientSums.finish = finished  # type: ignore[method-assign]
    replication.fill_reduce_scatter = traced(replication.fill_reduce_scatter)
    dist.all_reduce = traced(dist.all_reduce)
    dist.all_to_all_single = traced(dist.all_to_all_single)
    rank.train(2, 3)
    for thread in threads:
        thread.join()
    return spans, waits, ends[0]


@pytest.mark.parametrize(("zero_stage", "bits"), [(0, None), (1, None), (1, 8)])
def test_reductions_lie_inside_the_backward_pass(zero_stage, bits):
    """At least 90 % of their time, over gloo; what is left is the first layers' bucket, which has nothing to hide
    behind. And the pass goes on meanwhile: it stands still for less than 0.4 of that time where the other rank is
    not behind, at least once of three times, for whoever else computes here makes a rank wait."""
    still = list[float]()
    while len(still) < 6 and min(still, default=1.0) >= 0.4:
        ranks = run_ranks(reductions, 2, zero_stage, bits, backend="gloo")
        end = max(end for *_, end in ranks)
        for spans, waits, _ in ranks:
            assert len(spans) > 20
            total = sum(done - began for began, done in spans)
            assert before(end, spans) >= 0.9 * total
            still.append(before(end, waits) / total)
    assert min(still) < 0.4, still


def before(end: float, spans: list[Span]) -> float:
    """Seconds of spans before a time."""
    return sum(min(done, end) - min(began, end) for began, done in spans)


def watched(begin: Callable[..., dist.Work], under_way: list[dist.Work]) -> Callable[..., SimpleNamespace]:
    """Begins a message as before, which is under way until somebody has waited for it."""

    def call(*arguments: Any, **options: Any) -> SimpleNamespace:
        under_way.append(work := begin(*arguments, **options))

        def wait() -> None:
            work.wait()
            under_way.remove(work)

        return SimpleNamespace(wait=wait)

    return call


def gatherings(zero_stage: int) -> tuple[int, list[int]]:
    """Buckets, and how many are still to be waited for: behind a step, and as each block of the next begins."""
    engine.BUCKET_NUMBERS = BUCKET
    rank = start_rank(tiny_config(parallel={"dp": 2, "zero_stage": zero_stage}, **MANY_OF_FEW_TOKENS))
    under_way: list[dist.Work] = []
    messages.fill_all_gather = watched(messages.fill_all_gather, under_way)
    rank.train(0, 1)
    seen = [len(under_way)]
    for block in rank.engine.stage.blocks.values():
        block.register_forward_pre_hook(lambda *_: seen.append(len(under_way)))
    rank.train(1, 2)
    return len(rank.engine._buckets), seen


def test_weights_are_gathered_behind_the_next_forward_pass():
    """A step leaves all of them under way, and a block waits for its own alone."""
    for num_buckets, (left, *before_blocks) in run_ranks(gatherings, 2, 1, backend="gloo"):
        assert left == num_buckets > 20
        first = before_blocks[: MANY["model"]["num_layers"]]
        assert first == sorted(first, reverse=True)
        assert first[0] > num_buckets / 2
        assert len(set(first)) > 6


def curves(zero_stage: int, least: int) -> list[tuple[float, float]]:
    """Losses and norms of steps in whose buckets runs of so many bytes travel by messages from each to each."""
    engine.BUCKET_NUMBERS, messages.LARGE_BYTES = BUCKET, least
    parallel, precision = {"dp": 4, "zero_stage": zero_stage}, {"reduce_bits": 8 if zero_stage == 0 else None}
    rank = start_rank(tiny_config(parallel=parallel, precision=precision, **MANY_OF_FEW_TOKENS))
    found = rank.train(0, 2)  # the second step has what the first has gathered
    rank.engine.close()  # whoever ended with messages under way would end them for the others, too
    return found


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_large_runs_travel_from_each_to_each(zero_stage):
    """All buckets of a step at once, and weights are those that an all-gather brings, to the last bit."""
    each_to_each, gathered = (run_ranks(curves, 4, zero_stage, least, backend="gloo") for least in (0, 2**40))
    assert each_to_each == gathered
