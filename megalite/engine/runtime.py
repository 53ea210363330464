"""Bringing up a rank: torch.distributed, and how torch computes on its device.

Everything here happens once a process, before any model exists.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from megalite.errors import UnavailableError
from megalite.host import cpu_flags
from megalite.parallel.rendezvous import open_store

AGENT_STORE_VARIABLE = "TORCHELASTIC_USE_AGENT_STORE"
"""Set by torchrun, which has a store of its own at the address that it gives."""


def check_dtype(dtype: str, device_type: str) -> None:
    """See whether this rank's device has the format of a run.

    Raises:
        UnavailableError: fp16 on a CPU without units for it.
    """
    if dtype == "fp16" and not has_fp16(device_type):
        raise UnavailableError(
            f"precision.dtype=fp16: this {device_type.upper()} has no units for it; set precision.dtype=bf16, or fp32, "
            "which is faster without bf16 units"
        )


def has_fp16(device_type: str) -> bool:
    """Whether this rank's device has units for it: GPUs since Volta, and some CPUs."""
    if device_type == "cuda":
        return torch.cuda.get_device_capability() >= (7, 0)
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def let_products_round(rounded_to: str, device_type: str) -> None:
    """Have torch round the numbers of fp32's products to a format where that is faster, see `precision.products`.

    On a GPU, to TF32 for either format, or surely not at all: some containers have an environment that begins with
    TF32. On a CPU, to bf16 where AMX multiplies that; else the choice of a backend finds the fastest exact way.
    """
    if device_type == "cuda":
        torch.set_float32_matmul_precision("highest" if rounded_to == "fp32" else "high")
    elif rounded_to == "bf16" and "amx_bf16" in cpu_flags():
        torch.set_float32_matmul_precision("medium")


def set_determinism(deterministic: bool | None, device_type: str) -> None:
    """Have torch compute the same bits in every run, or not; None for a device's usual way, see `run.deterministic`.

    On a GPU, before anything is computed there: cuBLAS is deterministic with workspaces of fixed sizes only.
    """
    if deterministic is None:
        deterministic = device_type == "cpu"
    if deterministic and device_type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    # What is not filled costs no pass over each new buffer; torch has it as a property of the module's class
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # see above


def connect_processes(
    *,
    rank: int,
    world_size: int,
    device_type: str,
    init_method: str,
    token: str = "",
    say: Callable[[str], None] = lambda what: None,
    timeout_seconds: float = 1800.0,
    for_host: bool = False,
) -> None:
    """Initialise torch.distributed.

    Args:
        rank: global rank.
        world_size: number of ranks.
        device_type: `cpu` takes gloo, `cuda` takes NCCL.
        init_method: where ranks find each other, as torch takes it: `tcp://host:port` or `file:///path`.
        token: of the attempt, by which ranks know each other; empty for none.
        say: is told who is waited for.
        timeout_seconds: a collective that takes longer is an error.
        for_host: there are collectives of tensors in the host's memory too: of masters that live there.

    Raises:
        StartError: the ranks could not meet.
    """
    backend = "gloo" if device_type == "cpu" else "cpu:gloo,cuda:nccl" if for_host else "nccl"
    if not dist.is_initialized():
        store = None
        if init_method.startswith("tcp://") and AGENT_STORE_VARIABLE not in os.environ:
            store = open_store(init_method, rank=rank, world_size=world_size, token=token, say=say)
        dist.init_process_group(
            backend,
            init_method=init_method if store is None else None,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_seconds),
            device_id=torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else None,
        )


def disconnect_processes() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()
