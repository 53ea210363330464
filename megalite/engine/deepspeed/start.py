"""Bringing DeepSpeed up, and the known traps of doing so. Runs on other engines never import it, which takes half a
second."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator


def start_deepspeed(device_type: str) -> None:
    """Let DeepSpeed use the process groups that torch has, once a process and before an engine."""
    prepare_deepspeed(device_type)
    import deepspeed

    backend = "gloo" if device_type == "cpu" else "nccl"
    deepspeed.init_distributed(dist_backend=backend, verbose=False, dist_init_required=False)


def prepare_deepspeed(device_type: str) -> None:
    """Import DeepSpeed for a device, quietly, without its compile step at first use.

    On a CPU, `init_distributed` would build a shared-memory op with a compiler (a minute of CPU, and a build that was
    killed leaves a lock on which every later process hangs); only inference uses that op, so it is switched off.

    On a GPU, ZeRO-3 waits for the device after every backward pass and every gather, in case its reductions and
    gathers run on streams of their own. They do not: with `overlap_comm` off they are on the stream of everything else,
    in order (stage3.py:340, parameter_offload.py:195), which is what a device is asked by `resolves_data_dependency`.
    """
    os.environ.setdefault("DS_ACCELERATOR", device_type)
    os.environ.setdefault("LOCAL_RANK", "0")
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")  # DeepSpeed's old names
    if device_type == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    else:
        get_accelerator().resolves_data_dependency = lambda: True  # as long as deepspeed_config has overlap_comm off


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep DeepSpeed's tables and memory reports, which it prints on every start, off standard output."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield
