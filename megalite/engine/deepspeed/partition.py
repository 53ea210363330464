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

from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite.engine.partition import OverReplicas
from megalite.model.initialize import WeightSource, fill
from megalite.model.transformer import Stage
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


class ZeroPartition(OverReplicas):
    """See `engine.partition.Partition`: what a DeepSpeed engine keeps at each ZeRO stage."""

    def __init__(self, engine: Any, stage: Stage, axes: Axes, zero_stage: int):
        super().__init__(axes, divides_state=zero_stage >= 1, divides_weights=zero_stage == 3)
        self._engine, self._stage, self._zero_stage = engine, stage, zero_stage
        if zero_stage == 3:
            _share_bf16_masters(engine.optimizer)

    def part_of(self, parameter: nn.Parameter) -> tuple[int, Tensor] | None:
        if self._zero_stage == 0:
            return 0, parameter.detach().view(-1)
        return _of_stage_3(parameter) if self._zero_stage == 3 else _of_stage_1_and_2(parameter)

    def flat_weights(self) -> list[Tensor]:
        """fp32, or bf16 where weights live in it alone."""
        for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
            if hasattr(self._engine.optimizer, name):
                return list(getattr(self._engine.optimizer, name))
        return [weight for group in self._engine.optimizer.param_groups for weight in group["params"]]

    def held(self, parameter: nn.Parameter) -> Tensor:
        return zero_view(parameter).ds_tensor if self.divides_weights else parameter

    def refresh(self, weights: WeightSource, *, with_still: bool = True) -> None:
        if self._zero_stage == 3:
            _gather_anew(self._engine.optimizer)
        elif self._zero_stage:
            fill(self._stage, weights)  # from the page cache by now: sooner there than gathered from the other ranks

    def spare(self) -> list[Tensor]:
        return [torch.empty_like(flat) for flat in self.flat_weights()]


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


def _share_bf16_masters(optimizer: Any) -> None:
    """Let masters in bf16 be the very memory of stage 3's weights. DeepSpeed means to, but compares a device with a
    string (stage3.py:1156)."""
    for number, master in enumerate(optimizer.fp32_partitioned_groups_flat):
        if master.dtype == torch.bfloat16:
            master.data = optimizer.fp16_partitioned_groups_flat[number].data


def _gather_anew(optimizer: Any) -> None:
    """Under stage 3, make the module compute with master weights that were set from outside. Collective."""
    optimizer.checkpoint_event_prologue()  # frees weights that are gathered at the moment
    for number in range(len(optimizer.fp16_groups)):
        optimizer._reassign_or_swap_out_partitioned_parameters(number)
    optimizer.checkpoint_event_epilogue()  # gathers again what is always kept whole
