"""The device of a rank, and how fast it could be at best."""

from __future__ import annotations

import platform
import time
from importlib import metadata
from typing import Any

import torch

from megalite import __version__
from megalite.errors import UnavailableError
from megalite.layers.gemm import choose_gemm

DENSE_BF16_FLOPS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "V100": 125e12,
}
"""Dense bf16 (V100: fp16) peaks of the makers' data sheets, FLOP/s; matched by the first name that the device's
contains."""

CEILING_SIZE = 1024
CEILING_TRIES = 8


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """The device of this rank under `train.device`.

    Raises:
        UnavailableError: CUDA was asked for and is not here, or has fewer devices than local ranks.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UnavailableError(
            "train.device=cuda, but torch finds no CUDA device here; set train.device=cpu, or run `megalite doctor`"
        )
    if local_rank >= torch.cuda.device_count():
        raise UnavailableError(
            f"local rank {local_rank} has no GPU: this machine has {torch.cuda.device_count()}; start fewer ranks on it"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def free_bytes(device: torch.device) -> int:
    """Memory of a CUDA device that nobody uses yet."""
    return torch.cuda.mem_get_info(device)[0]


def describe_machine(device: torch.device) -> dict[str, Any]:
    """What a rank runs on: device, host, versions of what computes."""
    name = f" {torch.cuda.get_device_name(device)}" if device.type == "cuda" else ""
    software = {package: metadata.version(package) for package in ("torch", "deepspeed")}
    return {
        "device": f"{device}{name}",
        "host": platform.node(),
        "software": {"megalite": __version__, "python": platform.python_version(), **software},
    }


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s that MFU is counted against: the data sheet's bf16 peak for a known GPU, else a measured product."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for known, flops in DENSE_BF16_FLOPS.items():
            if known in name:
                return flops
    return measure_gemm_flops(device, dtype)


def measure_gemm_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the fastest of a few square products, by the backend that training uses: a ceiling for a step."""
    gemm = choose_gemm(device.type, dtype)
    left, right = (torch.randn(CEILING_SIZE, CEILING_SIZE, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(CEILING_TRIES):
        start = time.perf_counter()
        gemm.multiply(left, right)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2.0 * CEILING_SIZE**3 / best
