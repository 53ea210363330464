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
from dataclasses import replace
from typing import Any, Protocol, cast

import torch.distributed as dist
from torch import Tensor, nn

from megalite.model.initialize import LocalWeight, local_weights
from megalite.model.transformer import Stage
from megalite.optim.slices import Slice, whole_slices
from megalite.parallel.axes import Axes


class ZeroView(Protocol):
    """What DeepSpeed hangs on a parameter that ZeRO divides."""

    _hp_mapping: Any
    """Stages 1 and 2: a `tensor_fragment`; None when other ranks have all."""
    ds_tensor: Tensor
    """Stage 3: this rank's part of the flattened parameter, padded."""
    ds_numel: int
    """Stage 3: of the whole."""
    ds_process_group: dist.ProcessGroup
    """Stage 3: the ranks that divide it."""


def zero_view(parameter: nn.Parameter) -> ZeroView:
    """A parameter of an engine with ZeRO, which torch's own type knows nothing of."""
    return cast("ZeroView", parameter)


def weight_slices(stage: Stage, axes: Axes, zero_stage: int) -> Iterator[Slice]:
    """What this rank updates of the weights, vocabulary padding left out: everything it holds, without ZeRO."""
    found = whole_slices(stage) if zero_stage == 0 else _zero_slices(stage, zero_stage)
    is_other_replica = zero_stage == 0 and axes.replicas.rank != 0
    return (replace(part, is_copy=is_other_replica or is_copy_in_model(part.local, axes)) for part in found)


def is_copy_in_model(local: LocalWeight, axes: Axes) -> bool:
    """Whether another rank of the same model replica stands for a weight: replicated ones and tied pairs count once."""
    is_tied_copy = local.parameter_name == "head.weight" and local.weight.layer == "embedding"
    return is_tied_copy or (local.weight.cut is None and axes.tp.rank != 0)


def _zero_slices(stage: Stage, zero_stage: int) -> Iterator[Slice]:
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


def _of_stage_1_and_2(parameter: nn.Parameter) -> tuple[int, Tensor] | None:
    """Where this rank's slice of a flattened parameter begins, and its numbers; None when other ranks have all."""
    mapping = zero_view(parameter)._hp_mapping
    if mapping is None:
        return None
    return mapping.lp_fragment_address.start, mapping.get_hp_fragment().detach()


def _of_stage_3(parameter: nn.Parameter) -> tuple[int, Tensor] | None:
    """The same under stage 3, where the last slices of a parameter may be padding."""
    from deepspeed.utils import safe_get_local_fp32_param

    view = zero_view(parameter)
    size = view.ds_tensor.numel()
    start = size * dist.get_rank(view.ds_process_group)
    length = min(size, view.ds_numel - start)
    if length <= 0:
        return None
    return start, safe_get_local_fp32_param(parameter).detach().narrow(0, 0, length)
