"""The device of a rank, and how fast it could be at best."""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from megalite import __version__
from megalite.errors import UnavailableError
from megalite.host import cpu_class
from megalite.layers.gemm import fp32_products

DENSE_BF16_FLOPS = {
    "NVIDIA A10": 125e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A30": 165e12,
    "NVIDIA A40": 149.7e12,
    "NVIDIA A800 80GB PCIe": 312e12,
    "NVIDIA A800-SXM4-80GB": 312e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2500e12,
    "NVIDIA GH200 480GB": 989e12,
    "NVIDIA GH200 144G HBM3e": 989e12,
    "NVIDIA GeForce RTX 3090": 71e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "NVIDIA GeForce RTX 5090": 209.5e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 NVL": 835.5e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H20": 148e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 835.5e12,
    "NVIDIA H800": 989e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40": 181e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA RTX 6000 Ada Generation": 364e12,
    "NVIDIA RTX A6000": 154.8e12,
    "Tesla V100-SXM2-16GB": 125e12,
    "Tesla V100-SXM2-32GB": 125e12,
}
"""Dense bf16 (V100: fp16) peaks of the makers' data sheets with fp32 sums, FLOP/s, by the whole name that CUDA reports:
parts of names are shared by devices of quite different speed (L4 and L40, A10 and A100, H100 SXM and NVL)."""

CEILING_SIZE = {"cpu": 1024, "cuda": 8192}
"""Of the product that is timed where the peak is not known, at most: so large that starting it takes no part of the
time."""
CEILING_TRIES = 8
SMALLEST_CEILING = 128
"""Of the one that is tried first."""
CEILING_SECONDS = 0.5
"""That one product may take; where it would take longer it is smaller."""


@dataclass(frozen=True)
class Peak:
    """What MFU is a share of."""

    flops: float
    """FLOP/s of one device."""
    origin: str
    """Where the figure is from."""

    def __str__(self) -> str:
        return f"{self.flops / 1e12:,.{0 if self.flops >= 1e13 else 2}f} TFLOP/s a device, {self.origin}"


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """The device of this rank under `train.device`, from now on the one that this process uses.

    Raises:
        UnavailableError: as `find_device`.
    """
    device = find_device(wanted, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def find_device(wanted: str, local_rank: int) -> torch.device:
    """The device of a rank under `train.device`. Nothing is done on it: a process that as much as chooses a GPU takes
    half a gigabyte there.

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


def kind_of_machine(device: torch.device) -> str:
    """What a rank computes on, by what decides its last digits: the name of its GPU, or its class of CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU {cpu_class()}"


def kind_with_products(device: torch.device) -> str:
    """The same with what multiplies there, once an engine is built."""
    kind = kind_of_machine(device)
    return kind if device.type == "cuda" else f"{kind}, products of fp32 by {fp32_products()}"


def find_peak(device: torch.device, dtype: torch.dtype) -> Peak:
    """What MFU is counted against: the data sheet's bf16 peak for a known GPU, else a measured product."""
    if device.type == "cuda":
        known = DENSE_BF16_FLOPS.get(torch.cuda.get_device_name(device))
        if known is not None:
            return Peak(known, "its data sheet's dense bf16 peak")
    name = str(dtype).removeprefix("torch.")
    flops, size = measure_gemm_flops(device, dtype, CEILING_SIZE[device.type])
    return Peak(flops, f"measured here: a product of {size} x {size} in {name}")


def measure_gemm_flops(device: torch.device, dtype: torch.dtype, largest: int) -> tuple[float, int]:
    """FLOP/s of the fastest of a few square products, by what the engine, which is there, has chosen for its own; and
    their size, which is less than the largest where that takes seconds: fp16 on a CPU without units for it."""
    size = SMALLEST_CEILING
    # The first product of a kind loads what makes it, and the next size takes eight times as long
    while size < largest and _seconds_of_product(device, dtype, size, tries=3) < CEILING_SECONDS / 8:
        size *= 2
    return 2.0 * size**3 / _seconds_of_product(device, dtype, size, tries=CEILING_TRIES), size


def _seconds_of_product(device: torch.device, dtype: torch.dtype, size: int, *, tries: int) -> float:
    """Of the fastest."""
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(tries):
        start = time.perf_counter()
        torch.mm(left, right)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best
