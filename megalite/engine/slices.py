"""The part of each weight that ZeRO keeps on this rank: live memory, found without communication.

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

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite.model.initialize import LocalWeight, local_weights
from megalite.model.transformer import Stage
from megalite.optim.slices import Slice, whole_slices


def weight_slices(stage: Stage, zero_stage: int) -> Iterator[Slice]:
    """What of the weights lies on this rank alone, vocabulary padding left out: everything, without ZeRO."""
    if zero_stage == 0:
        yield from whole_slices(stage)
        return
    rows: dict[str, list[LocalWeight]] = {}
    for local in local_weights(stage):
        rows.setdefault(local.parameter_name, []).append(local)
    for name, parameter in stage.named_parameters():
        found = _of_stage_3(parameter) if zero_stage == 3 else _of_stage_1_and_2(parameter)
        if found is None:
            continue
        begin, numbers = found
        end, first = begin + numbers.numel(), 0
        for local in rows[name]:
            last = first + math.prod(local.rectangle.shape)
            start, stop = max(begin, first), min(end, last)
            if start < stop:
                yield Slice(local, start - first, {"weight": numbers.narrow(0, start - begin, stop - start)})
            first = last


def copy_numbers(target: Tensor, source: Tensor) -> None:
    """Copy numbers into a tensor of the same shape; fp32 ones on the CPU with the calling thread alone.

    Torch would share the work out to a team of OpenMP threads, which gains little, memory being the limit, and waits
    at every tensor for the slowest: beside training, or other processes, that takes up to ten times as long.
    """
    if target.device.type == source.device.type == "cpu" and target.dtype == source.dtype == torch.float32:
        np.copyto(target.detach().numpy(), source.detach().numpy())
    else:
        target.copy_(source, non_blocking=True)


def _of_stage_1_and_2(parameter: nn.Parameter) -> tuple[int, Tensor] | None:
    """Where this rank's slice of a flattened parameter begins, and its numbers; None when other ranks have all."""
    mapping = parameter._hp_mapping  # DeepSpeed's `tensor_fragment`
    if mapping is None:
        return None
    return mapping.lp_fragment_address.start, mapping.get_hp_fragment().detach()


def _of_stage_3(parameter: nn.Parameter) -> tuple[int, Tensor] | None:
    """The same under stage 3, where the last slices of a parameter may be padding."""
    from deepspeed.utils import safe_get_local_fp32_param

    size = parameter.ds_tensor.numel()
    start = size * dist.get_rank(parameter.ds_process_group)
    length = min(size, parameter.ds_numel - start)
    if length <= 0:
        return None
    return start, safe_get_local_fp32_param(parameter).detach().narrow(0, 0, length)
