"""The weights and optimizer state of a stage inside a DeepSpeed engine, by canonical name, whatever the ZeRO stage.

DeepSpeed owns the master weights, as flat tensors; the optimizer's state is ours, bound to slices of them
(`optim.optimizer`). Binding happens once, when DeepSpeed has laid everything out and before the first step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megalite.architecture.weights import Rectangle, Weight
from megalite.engine.deepspeed.partition import is_copy_in_model, weight_slices, zero_view
from megalite.engine.parts import Part, parts_of_slice
from megalite.engine.protocol import HeldWeight, LocalState
from megalite.model.initialize import CUT_MARK, LocalWeight, WeightSource, fill, local_weights
from megalite.model.transformer import Stage
from megalite.optim.optimizer import OwnedState, SlicedOptimizer
from megalite.optim.slices import Slice, copy_numbers
from megalite.parallel.axes import Axes
from megalite.parallel.collectives import all_reduce

MAX_SLICES = 64
"""Slices of one weight, under ZeRO-3: on more ranks than this, whole weights are gathered to be saved."""


class StageState:
    """Reads and writes what the optimizer works on. Building it binds the optimizer; collective."""

    def __init__(self, engine: Any, stage: Stage, axes: Axes, zero_stage: int):
        self._engine, self._stage, self._axes, self._zero_stage = engine, stage, axes, zero_stage
        self._parameters: dict[str, nn.Parameter] = dict(stage.named_parameters())
        self.optimizer: SlicedOptimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
        if zero_stage == 3:
            _share_bf16_masters(engine.optimizer)
        self.optimizer.bind(
            weight_slices(stage, axes, zero_stage),
            _flat_weights(engine),
            axes.stage if zero_stage else axes.tp,
            axes.tp.rank,
        )

    @property
    def slices(self) -> list[Slice]:
        """What this rank updates."""
        return self.optimizer.slices

    def owned_states(self) -> Iterator[OwnedState]:
        """What this rank keeps whole; without ZeRO every replica keeps the same."""
        return self.optimizer.owned_states()

    def owned_parts(self) -> Iterator[Part]:
        """What this rank stands for: under ZeRO what it alone keeps, else weights in turns with its replicas."""
        is_crumbs = self._zero_stage == 3 and self._axes.replicas.size > MAX_SLICES
        if self._zero_stage == 0 or is_crumbs:
            yield from self._in_turns(is_live=not is_crumbs)
        else:
            for part in self.slices:
                if not part.is_copy:
                    yield from parts_of_slice(part)
        for state in self.optimizer.owned_states():
            if self._stands_for(state):
                for kind, (rectangle, tensor) in state.tensors.items():
                    yield Part(state.unit.weight.name, rectangle, {kind: tensor}, state.is_live)

    def held_weights(self) -> list[HeldWeight]:
        """Every parameter, or the part of it that stage 3 leaves here."""
        found = []
        for name, parameter in self._parameters.items():
            is_cut_by_zero, is_cut_by_tp = self._zero_stage == 3, getattr(parameter, CUT_MARK, False)
            over = (() if is_cut_by_zero else (self._axes.replicas,)) + (() if is_cut_by_tp else (self._axes.tp,))
            found.append(HeldWeight(name, zero_view(parameter).ds_tensor if is_cut_by_zero else parameter, over))
        return found

    def read(self) -> Iterator[LocalState]:
        """Yield every canonical weight with its elementwise state, one in memory at a time. Collective over dp."""
        slices: dict[tuple[str, str], list[Slice]] = {}
        for part in self.slices:
            slices.setdefault((part.local.parameter_name, part.local.weight.name), []).append(part)
        for local in local_weights(self._stage):
            mine = slices.get((local.parameter_name, local.weight.name), [])
            kinds = ("weight", *self.optimizer.elementwise_kinds(local.weight))
            yield LocalState(local, {kind: self._whole(local, mine, kind) for kind in kinds})

    def write(self, weights: WeightSource, state: dict[str, WeightSource], num_updates: int) -> None:
        """Set every weight and all state from sources by kind, each rank what it keeps; padding stays zero."""
        self.optimizer.num_updates = num_updates
        self._stage.precision.forget_weights()
        sources = {"weight": weights, **state}
        for part in self.slices:
            rows, skipped = _rows_of(part)
            for kind, tensor in part.tensors.items():
                numbers = sources[kind].read(part.local.weight, rows).reshape(-1)
                copy_numbers(tensor, numbers[skipped : skipped + tensor.numel()])

        def read(weight: Weight, kind: str, rectangle: Rectangle, shape: tuple[int, ...]) -> Tensor:
            return sources[kind].read(replace(weight, shape=shape), rectangle)

        self.optimizer.load_owned_states(read)
        if self._zero_stage == 3:
            _gather_anew(self._engine.optimizer)
        elif self._zero_stage:
            fill(self._stage, weights)  # from the page cache by now: sooner there than gathered from the other ranks

    def _in_turns(self, *, is_live: bool) -> Iterator[Part]:
        """Whole weights, each from one of the replicas."""
        replicas = self._axes.replicas
        for number, state in enumerate(self.read()):
            is_ours = number % replicas.size == replicas.rank and not is_copy_in_model(state.local, self._axes)
            if is_ours and math.prod(state.local.rectangle.shape) > 0:
                yield Part(state.local.weight.name, state.local.rectangle, state.tensors, is_live)

    def _stands_for(self, state: OwnedState) -> bool:
        """Whether no other rank with the same state comes first."""
        is_tied_copy = self._axes.pp.rank > 0 and state.unit.weight.layer == "embedding"
        is_other_replica = self._zero_stage == 0 and self._axes.replicas.rank != 0
        return not (is_tied_copy or is_other_replica or state.unit.replica != 0)

    def _whole(self, local: LocalWeight, slices: list[Slice], kind: str) -> Tensor:
        """All numbers of a local weight: a view without ZeRO, else gathered."""
        shape = local.rectangle.shape
        if self._zero_stage == 0 and slices:
            return slices[0].tensors[kind].view(shape)
        device = next(iter(self._parameters.values())).device
        whole = torch.zeros(math.prod(shape), device=device)
        for part in slices:
            whole[part.start : part.stop] = part.tensors[kind]
        return all_reduce(whole, self._axes.replicas).view(shape)


def _rows_of(part: Slice) -> tuple[Rectangle, int]:
    """The rows of the whole weight that a slice touches, and how many numbers of the first come before it."""
    start, shape = part.local.rectangle.start, part.local.rectangle.shape
    row_size = math.prod(shape[1:])
    first, last = part.start // row_size, -(-part.stop // row_size)
    return Rectangle((start[0] + first, *start[1:]), (last - first, *shape[1:])), part.start - first * row_size


def _flat_weights(engine: Any) -> list[Tensor]:
    """The tensors that the inner optimizer really steps on this rank: fp32, or bf16 where weights live in it alone."""
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
        if hasattr(engine.optimizer, name):
            return list(getattr(engine.optimizer, name))
    return [weight for group in engine.optimizer.param_groups for weight in group["params"]]


def _share_bf16_masters(optimizer: Any) -> None:
    """Let masters in bf16 be the very memory of stage 3's weights. DeepSpeed means to, but compares a device with a
    string (stage3.py:1156)."""
    for number, master in enumerate(optimizer.fp32_partitioned_groups_flat):
        if master.dtype == torch.bfloat16:
            master.data = optimizer.fp16_partitioned_groups_flat[number].data


def _gather_anew(optimizer: Any) -> None:
    """Under stage 3, make the module compute with master weights that were set from outside. Collective over dp."""
    optimizer.checkpoint_event_prologue()  # frees weights that are gathered at the moment
    for number in range(len(optimizer.fp16_groups)):
        optimizer._reassign_or_swap_out_partitioned_parameters(number)
    optimizer.checkpoint_event_epilogue()  # gathers again what is always kept whole
