"""What both engines do around a step: turn batches into model inputs, weigh the loss, count tokens.

The loss of a step is the sum over the valid tokens of the whole global batch, divided by their number N. DeepSpeed
averages over accumulation steps and dp, so each token gets the weight `grad_accum_steps x dp / N`, and the averages
come out as the exact sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from megalite.data.loader import Batch
from megalite.engine.optimizer_state import create_moments, read_parameter, set_num_updates
from megalite.engine.protocol import MOMENTS, LocalState
from megalite.engine.slices import Slice, copy_numbers, local_slices
from megalite.layers.documents import Documents, Targets
from megalite.model.initialize import LocalWeight, WeightSource, local_weights
from megalite.model.transformer import Stage
from megalite.model.weights import Rectangle
from megalite.parallel.axes import Axis
from megalite.parallel.collectives import all_reduce


def documents_of_batch(batch: Batch) -> Documents:
    """The documents of a micro-batch."""
    return Documents(batch.positions, batch.cu_seqlens, batch.max_seqlen, batch.keys)


def targets_of_batch(batch: Batch, scale: float = 1.0) -> Targets:
    """Labels of a micro-batch, valid tokens weighted by `scale` and the others by 0."""
    return Targets(batch.labels, batch.loss_mask.to(torch.float32) * scale)


def count_valid_tokens(batches: Sequence[Batch], dp: Axis) -> int:
    """Tokens of the global batch that count in the loss. Collective over dp."""
    count = torch.stack([batch.loss_mask.sum() for batch in batches]).sum()
    return int(all_reduce(count, dp).item())  # a sync, before any work is queued


def set_learning_rate(optimizer: Any, lr: float) -> None:
    """Set the rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


class StageState:
    """The weights and moments of a stage inside a DeepSpeed engine, by canonical name."""

    def __init__(self, engine: Any, stage: Stage, zero_stage: int):
        self._engine = engine
        self._stage = stage
        self._zero_stage = zero_stage
        self._parameters: dict[str, nn.Parameter] = dict(stage.named_parameters())
        self._rows: dict[str, list[LocalWeight]] = {name: [] for name in self._parameters}
        for local in local_weights(stage):
            self._rows[local.parameter_name].append(local)
        create_moments(engine)

    def read(self) -> Iterator[LocalState]:
        """Yield every canonical weight with its moments, one parameter in memory at a time. Collective over dp."""
        for name, parameter in self._parameters.items():
            tensors = read_parameter(self._engine, parameter, self._zero_stage)
            for local in self._rows[name]:
                yield LocalState(local, {key: local.view(tensor) for key, tensor in tensors.items()})

    def write(self, weights: WeightSource, moments: dict[str, WeightSource], num_updates: int) -> None:
        """Set every weight and moment from sources, each rank what it keeps; padding stays zero."""
        set_num_updates(self._engine, num_updates)
        sources = {"weight": weights, **moments}
        assert set(sources) == {"weight", *MOMENTS}
        if self._zero_stage == 0:
            for name, parameter in self._parameters.items():
                whole = read_parameter(self._engine, parameter, 0)
                for local in self._rows[name]:
                    for key, source in sources.items():
                        copy_numbers(local.view(whole[key]), source.read(local.weight, local.rectangle))
            return
        for part in local_slices(self._stage, self._zero_stage):
            rows, skipped = _rows_of(part)
            for key, source in sources.items():
                numbers = source.read(part.local.weight, rows).reshape(-1)
                copy_numbers(part.tensors[key], numbers[skipped : skipped + part.tensors[key].numel()])


def _rows_of(part: Slice) -> tuple[Rectangle, int]:
    """The rows of the whole weight that a slice touches, and how many numbers of the first come before it."""
    start, shape = part.local.rectangle.start, part.local.rectangle.shape
    row_size = math.prod(shape[1:])
    first, last = part.start // row_size, -(-part.stop // row_size)
    return Rectangle((start[0] + first, *start[1:]), (last - first, *shape[1:])), part.start - first * row_size
