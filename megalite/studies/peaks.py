"""What large products reach on a device, by number format."""

from __future__ import annotations

import torch

from megalite.engine.runtime import let_products_round
from megalite.layers.gemm import choose_gemm
from megalite.train.device import measure_gemm_flops

SIZE = {"cpu": 2048, "cuda": 8192}
"""Rows, columns and inner numbers of what is multiplied."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32}

TF32_SINCE = 8, 0
"""Compute capability (Ampere)."""


def peaks(device: torch.device) -> dict[str, float]:
    """FLOP/s of each format that a device has; from then on this process multiplies fp32 as a run does whose products
    may not round."""
    let_products_round("fp32", device.type)
    choose_gemm(device.type, torch.float32)
    return {each: peak(device, each) for each in formats_of(device)}


def formats_of(device: torch.device) -> tuple[str, ...]:
    """Whose products are timed. A CPU has no units for others, but for AMX, whose products of fp32 are not planned."""
    if device.type == "cpu":
        return "fp32", "bf16"
    tf32 = ("tf32",) if torch.cuda.get_device_capability(device) >= TF32_SINCE else ()
    return "fp32", "bf16", "fp16", *tf32


def peak(device: torch.device, name: str) -> float:
    """FLOP/s of large products in a format; TF32's are those of fp32 that may be rounded."""
    former = torch.get_float32_matmul_precision()
    if name == "tf32":
        torch.set_float32_matmul_precision("high")
    try:
        return measure_gemm_flops(device, DTYPES[name], SIZE[device.type])[0]
    finally:
        torch.set_float32_matmul_precision(former)
