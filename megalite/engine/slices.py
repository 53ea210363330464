"""The part of each weight, and of its moments, that ZeRO keeps on this rank: live memory, found without communication.

From stage 1 on, a dp rank holds a slice of the flattened weights: 1 and 2 cut the whole list of them into equal parts,
so most weights lie on one rank; 3 cuts every single one.

    flattened weights   [ embedding      | qkv  | out | up     | down   | ... ]
    ZeRO-1, 2           [ rank 0               | rank 1                | ... ]
    ZeRO-3              [ 0   | 1   | 2  | 0|1|2| ... ]

DeepSpeed's own functions hand out whole weights, gathered or scattered one at a time. To save and to load, every rank
needs no more than what it has, which is also right where theirs fail: stage 3 of 0.19.8 cannot set a weight whose size
the number of ranks does not divide (stage3.py:3196).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist
from torch import Tensor, nn

from megalite.engine.protocol import MOMENTS
from megalite.model.initialize import LocalWeight, local_weights
from megalite.model.transformer import Stage


@dataclass(frozen=True)
class Slice:
    """Consecutive numbers of a weight's local part, read row by row."""

    local: LocalWeight
    start: int
    """The first number, counted in the flattened local part."""
    tensors: dict[str, Tensor]
    """By kind (`weight` and the moments), flat, fp32: the optimizer's own memory."""

    @property
    def stop(self) -> int:
        """One past the last number."""
        return self.start + self.tensors["weight"].numel()


def local_slices(stage: Stage, zero_stage: int) -> Iterator[Slice]:
    """Everything that ZeRO keeps on this rank, vocabulary padding left out. `zero_stage` is 1, 2 or 3."""
    rows: dict[str, list[LocalWeight]] = {}
    for local in local_weights(stage):
        rows.setdefault(local.parameter_name, []).append(local)
    for name, parameter in stage.named_parameters():
        found = _of_stage_3(parameter) if zero_stage == 3 else _of_stage_1_and_2(parameter)
        if found is None:
            continue
        begin, tensors = found
        end, first = begin + tensors["weight"].numel(), 0
        for local in rows[name]:
            last = first + math.prod(local.rectangle.shape)
            start, stop = max(begin, first), min(end, last)
            if start < stop:
                mine = {kind: tensor.narrow(0, start - begin, stop - start) for kind, tensor in tensors.items()}
                yield Slice(local, start - first, mine)
            first = last


def copy_numbers(target: Tensor, source: Tensor) -> None:
    """Copy fp32 numbers into a tensor of the same shape; on the CPU with the calling thread alone.

    Torch would share the work out to a team of OpenMP threads, which gains little, memory being the limit, and waits
    at every tensor for the slowest: beside training, or other processes, that takes up to ten times as long.
    """
    if target.device.type == "cpu" and source.device.type == "cpu":
        np.copyto(target.detach().numpy(), source.detach().numpy())
    else:
        target.copy_(source, non_blocking=True)


def _of_stage_1_and_2(parameter: nn.Parameter) -> tuple[int, dict[str, Tensor]] | None:
    """Where this rank's slice of a flattened parameter begins, and its numbers; None when other ranks have all."""
    mapping = parameter._hp_mapping  # DeepSpeed's `tensor_fragment`
    if mapping is None:
        return None
    tensors = {"weight": mapping.get_hp_fragment()}
    tensors |= {key: mapping.get_hp_fragment(optim_state_key=key) for key in MOMENTS}
    return mapping.lp_fragment_address.start, {kind: tensor.detach() for kind, tensor in tensors.items()}


def _of_stage_3(parameter: nn.Parameter) -> tuple[int, dict[str, Tensor]] | None:
    """The same under stage 3, where the last slices of a parameter may be padding."""
    from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state

    size = parameter.ds_tensor.numel()
    start = size * dist.get_rank(parameter.ds_process_group)
    length = min(size, parameter.ds_numel - start)
    if length <= 0:
        return None
    tensors = {"weight": safe_get_local_fp32_param(parameter)}
    tensors |= {key: safe_get_local_optimizer_state(parameter, key) for key in MOMENTS}
    return start, {kind: tensor.detach().narrow(0, 0, length) for kind, tensor in tensors.items()}
