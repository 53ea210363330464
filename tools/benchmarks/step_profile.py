"""Where the time of a training step goes, and how near its products come to what the machine multiplies.

    share = FLOPs of the layers' products / (its seconds x FLOP/s of large square products, alone, in the same format)

A step that did nothing but multiply by its weights, at that rate, would have a share of 1; attention is not counted.
The seconds are those of steps without the profiler, for it slows them down. Of several ranks the first is looked at,
with its part of the products, and all measure their rate at once: cores share caches and memory.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

SQUARE = 2048
"""Rows, columns and inner numbers of the product whose rate is the limit."""
STEPS = 3
SHOWN = 12


def profile_step(
    step: Callable[[int], None], first: int, dtype: torch.dtype, *, flops: float, step_seconds: float
) -> dict:
    """Profile some steps.

    Args:
        step: does one, by its number.
        first: number of the first.
        dtype: of the products.
        flops: of a step's products by weights.
        step_seconds: what one takes by itself.
    """
    start = time.perf_counter()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for number in range(first, first + STEPS):
            step(number)
        seconds = time.perf_counter() - start
    rows = seen.key_averages()
    rate = product_rate(dtype)
    whole = sum(row.self_cpu_time_total for row in rows)
    longest = sorted(rows, key=lambda row: -row.self_cpu_time_total)[:SHOWN]
    return {
        "step_ms": round(step_seconds * 1e3, 1),
        "gflop": round(flops / 1e9, 1),
        "limit_gflops": round(rate / 1e9, 1),
        "share_of_limit": round(flops / (step_seconds * rate), 3),
        "outside": round(max(0.0, 1.0 - whole / 1e6 / seconds), 3),
        "longest": [[row.key[:60], row.count // STEPS, round(row.self_cpu_time_total / whole, 3)] for row in longest],
    }


def accompany_profile(step: Callable[[int], None], first: int, dtype: torch.dtype) -> None:
    """What the other ranks do while the first is profiled."""
    for number in range(first, first + STEPS):
        step(number)
    product_rate(dtype)


def product_rate(dtype: torch.dtype) -> float:
    """FLOP/s of a large square product: the median of several. Collective: all ranks multiply at once."""
    left, right = (torch.randn(SQUARE, SQUARE).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    dist.barrier()
    seconds = []
    for _ in range(8):
        start = time.perf_counter()
        torch.mm(left, right, out=out)
        seconds.append(time.perf_counter() - start)
    return 2.0 * SQUARE**3 / statistics.median(seconds[2:])


def show_profile(name: str, found: dict) -> None:
    """For people."""
    print(
        f"{name}: {found['step_ms']} ms a step, {found['gflop']} GFLOP of products at {found['limit_gflops']} GFLOP/s: "
        f"{found['share_of_limit']:.0%} of the limit; {found['outside']:.0%} outside of operations"
    )
    for what, calls, share in found["longest"]:
        print(f"  {share:6.1%} of the profile {calls:6} x {what}")
