"""Becoming the newest attempt of a run, all ranks together, and clearing away what others have left unfinished."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from megalite.checkpoint.catalog import CHECKPOINTS, sweep
from megalite.checkpoint.fence import ATTEMPTS, Fence, SupersededError, take_attempt
from megalite.parallel.axes import Axes
from megalite.parallel.collectives import all_reduce


def join_attempt(run_dir: Path, number: int | None, axes: Axes, device: torch.device) -> Fence:
    """Take the next attempt's number, or the given one; the first rank does it for all. Collective.

    Raises:
        SupersededError: on all ranks, when the given number is not the highest.
    """
    folder = run_dir / ATTEMPTS
    taken, error = 0, None
    if axes.global_rank == 0:
        try:
            taken = take_attempt(folder, number).attempt
            sweep(run_dir / CHECKPOINTS, taken)  # before anyone looks for the checkpoint to start from
        except SupersededError as caught:
            error = caught
    attempt = int(all_reduce(torch.tensor(taken, device=device), axes.world, dist.ReduceOp.MAX).item())
    if attempt == 0:
        raise error or SupersededError(f"{run_dir}: the first rank could not become the newest attempt")
    return Fence(folder, attempt)
