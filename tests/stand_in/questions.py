"""What a machine with GPUs is asked outside of a run: by `doctor`, by the check of a node, of a link, of a device."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

SMALL = 64
"""Of a product where a GPU would get one of thousands."""

OLD_GPU = "Tesla T4"


def ask_all(folder: Path, rank: int, world_size: int, port: int) -> None:
    """Each question once; those about links need two ranks."""
    if world_size == 2:
        _ask_link(rank, port)
        return
    device = torch.device("cuda", 0)
    _ask_machine(folder)
    _ask_node()
    _ask_device(device)
    _ask_straggler_timer(device, folder)
    _ask_fp8(device)


def _ask_machine(folder: Path) -> None:
    from megalite.planner.examine import examine

    found = {finding.name: finding for finding in examine(folder)}
    assert found["CUDA"].present, found["CUDA"]
    assert found["CUDA"].found.startswith("2 x NVIDIA H100"), found["CUDA"]


def _ask_node() -> None:
    from megalite.slurm import node_check

    node_check.MATMUL_SIZE["cuda"] = SMALL
    os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"
    before = torch.cuda.current_device()
    found = node_check._examine_gpus()
    assert len(found) == 2, found
    assert torch.cuda.current_device() == before


def _ask_device(device: torch.device) -> None:
    from megalite.errors import UnavailableError
    from megalite.train import device as devices

    devices.CEILING_SIZE["cuda"] = SMALL
    assert devices.find_peak(device, torch.bfloat16).flops == 989e12
    name = torch.cuda.get_device_name
    torch.cuda.get_device_name = lambda *_: f"{name()} NVL"  # another card, with another peak
    try:
        assert devices.find_peak(device, torch.bfloat16).origin.startswith("measured here")
    finally:
        torch.cuda.get_device_name = name
    with suppress(UnavailableError):
        devices.find_device("cuda", 2)
        raise AssertionError("a third device was found")


def _ask_straggler_timer(device: torch.device, folder: Path) -> None:
    from megalite.train.components import straggler_timer

    straggler_timer.PRODUCT_SIZE["cuda"] = SMALL
    noted: list[float] = []
    heart = SimpleNamespace(is_watched=True, note_product=noted.append)
    straggler_timer.StragglerTimer(heart, device, every_seconds=0.0).take()
    assert len(noted) == 1


def _ask_fp8(device: torch.device) -> None:
    from megalite.config.schema import Fp8Config
    from megalite.layers.fp8.available import why_unavailable

    config = Fp8Config(backend="scaled_mm", recipe="rowwise")
    assert why_unavailable(config, device) == ""
    found, name = torch.cuda.get_device_capability, torch.cuda.get_device_name
    torch.cuda.get_device_capability, torch.cuda.get_device_name = (lambda *_: (7, 5)), (lambda *_: OLD_GPU)
    try:
        assert why_unavailable(config, device).startswith(f"{OLD_GPU} has compute capability 7.5")
    finally:
        torch.cuda.get_device_capability, torch.cuda.get_device_name = found, name


def _ask_link(rank: int, port: int) -> None:
    from megalite.slurm import link_check

    dist.destroy_process_group()  # of the runs before
    link_check.NUM_BYTES["nccl"] = 2**17
    assert link_check._measure_pair(f"tcp://127.0.0.1:{port}", rank, "nccl", "token") > 0
