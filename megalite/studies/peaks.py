"""What large products reach on a device, by number format."""

from __future__ import annotations

import time
from math import inf

import torch

from megalite.engine.runtime import let_products_round
from megalite.layers.fp8.products import scaled_mm
from megalite.layers.fp8.quantise import Quantised
from megalite.layers.gemm import choose_gemm
from megalite.train.device import measure_gemm_flops

SIZE = {"cpu": 2048, "cuda": 8192}
"""Rows, columns and inner numbers of what is multiplied."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32}

TF32_SINCE, FP8_SINCE = (8, 0), (8, 9)
"""Compute capability (Ampere, Ada)."""
TRIES = 10
"""Products in FP8, the fastest of which counts."""


def peaks(device: torch.device) -> dict[str, float]:
    """FLOP/s of each format that a device has; from then on this process multiplies fp32 as a run does whose products
    may not round."""
    let_products_round("fp32", device.type)
    choose_gemm(device.type, torch.float32)
    return {each: peak(device, each) for each in formats_of(device)}


def worth_planning_with(found: dict[str, float]) -> dict[str, float]:
    """FLOP/s by format, without FP8 where it gains nothing."""
    return {name: flops for name, flops in found.items() if name != "fp8" or flops >= found["bf16"]}


def formats_of(device: torch.device) -> tuple[str, ...]:
    """Whose products are timed. A CPU has no units for others, but for AMX, whose products of fp32 are not planned."""
    if device.type == "cpu":
        return "fp32", "bf16"
    since, capability = {"tf32": TF32_SINCE, "fp8": FP8_SINCE}, torch.cuda.get_device_capability(device)
    return "fp32", "bf16", "fp16", *(name for name, least in since.items() if capability >= least)


def peak(device: torch.device, name: str) -> float:
    """FLOP/s of large products in a format; TF32's are those of fp32 that may be rounded, FP8's those of matrices that
    are FP8 already, with a scale for each."""
    if name == "fp8":
        return _fp8_peak(device, SIZE[device.type])
    former = torch.get_float32_matmul_precision()
    if name == "tf32":
        torch.set_float32_matmul_precision("high")
    try:
        return measure_gemm_flops(device, DTYPES[name], SIZE[device.type])[0]
    finally:
        torch.set_float32_matmul_precision(former)


def _fp8_peak(device: torch.device, size: int) -> float:
    """FLOP/s of the fastest of a few square products."""
    one = torch.ones(1, 1, device=device)
    left, right = (
        Quantised(torch.randn(size, size, device=device).to(torch.float8_e4m3fn), one, (None, None)) for _ in range(2)
    )
    best = inf
    for _ in range(TRIES):
        start = time.perf_counter()
        scaled_mm(left, right, torch.bfloat16, is_forward=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best
