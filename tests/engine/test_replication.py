"""What replicas of the native engine send in a step, and when: by count, and by the clock."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import pytest
import torch.distributed as dist

from megalite.engine.native import engine, replication
from megalite.engine.native.sums import GradientSums
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
    names = {"_reduce_scatter": 1, "_all_gather": 0}
    for name, which in names.items():
        setattr(replication, name, counted(name.strip("_"), getattr(replication, name), which))
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


MANY = {
    "model": {"hidden_size": 256, "num_layers": 12, "num_heads": 4, "num_kv_heads": 4, "ffn_hidden_size": 704},
    "batch": {"micro_batch_size": 4, "global_batch_size": 16, "seq_len": 128},
}
BUCKET = 2**18
"""Numbers, so that this small model has dozens of buckets, as a large one has."""

Span = tuple[float, float]


def reductions(zero_stage: int, bits: int | None) -> tuple[list[Span], float]:
    """When each reduction of a step began and was done, and when the backward pass was over. By a clock that all
    processes of a machine share."""
    engine.BUCKET_NUMBERS = BUCKET
    precision = {"dtype": "fp32", "reduce_bits": bits}
    rank = start_rank(tiny_config(parallel={"dp": 2, "zero_stage": zero_stage}, precision=precision, **MANY))
    rank.train(0, 2)
    spans: list[Span] = []
    threads: list[threading.Thread] = []

    def traced(function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            began, work = time.perf_counter(), function(*arguments, **options)
            if options.get("async_op"):

                def watch() -> None:
                    work.wait()
                    spans.append((began, time.perf_counter()))

                threads.append(threading.Thread(target=watch))
                threads[-1].start()
            return work

        return call

    finish, ends = GradientSums.finish, []

    def finished(self: GradientSums) -> None:
        ends.append(time.perf_counter())
        finish(self)

    GradientSums.finish = finished  # type: ignore[method-assign]
    replication._reduce_scatter = traced(replication._reduce_scatter)
    dist.all_reduce = traced(dist.all_reduce)
    dist.all_to_all_single = traced(dist.all_to_all_single)
    rank.train(2, 3)
    for thread in threads:
        thread.join()
    return spans, ends[0]


@pytest.mark.parametrize(("zero_stage", "bits"), [(0, None), (1, None), (1, 8)])
def test_reductions_lie_inside_the_backward_pass(zero_stage, bits):
    """At least 90 % of their time, over gloo; what is left is the first layers' bucket, which has nothing to hide
    behind."""
    ranks = run_ranks(reductions, 2, zero_stage, bits, backend="gloo")
    end = max(end for _, end in ranks)
    for spans, _ in ranks:
        assert len(spans) > 20
        inside = sum(min(done, end) - min(began, end) for began, done in spans)
        assert inside >= 0.9 * sum(done - began for began, done in spans)
