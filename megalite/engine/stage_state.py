"""The weights and optimizer state of a stage inside an engine, by canonical name, whatever is divided among replicas.

The engine owns the weights that are updated, as flat tensors; the optimizer's state is bound to slices of them
(`optim.optimizer`). Binding happens once, when the engine has laid everything out and before the first step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from megalite.architecture.weights import Rectangle, Weight
from megalite.engine.partition import Partition, is_copy_at_end, is_copy_in_model, slices_of
from megalite.engine.parts import Part, parts_of_slice
from megalite.engine.protocol import HeldWeight, LocalState
from megalite.model.initialize import CUT_MARK, EXPERT_MARK, WeightSource, local_weights
from megalite.model.transformer import Stage
from megalite.optim.averaging import AveragingState, put_average
from megalite.optim.groups import Pacing
from megalite.optim.optimizer import OwnedState, SlicedOptimizer
from megalite.optim.slices import Slice, copy_numbers
from megalite.parallel.axes import Axes, Axis
from megalite.parallel.collectives import all_reduce

MAX_SLICES = 64
"""Slices of one weight, where each is divided: on more ranks than this, whole weights are gathered to be saved."""


class EngineOfState:
    """What every engine answers of weights and state, by its `StageState`; see `engine.protocol.Engine`."""

    _state: StageState

    def slices(self) -> Sequence[Slice]:
        return self._state.slices

    def averaged_weights(self) -> AbstractContextManager[None]:
        return self._state.averaged()

    def averaging(self) -> AveragingState:
        return self._state.optimizer.averaging_state()

    def set_averaging(self, state: AveragingState) -> None:
        self._state.optimizer.set_averaging(state)

    def set_pacing(self, pacing: Pacing) -> None:
        self._state.optimizer.pacing = pacing

    def gradients(self) -> Sequence[Tensor]:
        return self._state.optimizer.gradients()

    def owned_states(self) -> Iterator[OwnedState]:
        return self._state.owned_states()

    def owned_parts(self) -> Iterator[Part]:
        return self._state.owned_parts()

    def held_weights(self) -> list[HeldWeight]:
        return self._state.held_weights()

    def local_weights(self) -> Iterator[LocalState]:
        return self._state.read()


class StageState:
    """Reads and writes what the optimizer works on. Building it binds the optimizer; collective."""

    def __init__(self, optimizer: SlicedOptimizer, stage: Stage, axes: Axes, partition: Partition):
        self.optimizer = optimizer
        self._stage, self._axes, self._partition = stage, axes, partition
        self._parameters: dict[str, nn.Parameter] = dict(stage.named_parameters())
        updated, self._still = list[Slice](), list[Slice]()
        for part in slices_of(stage, axes, partition):
            is_updated = partition.updates(self._parameters[part.local.parameter_name])
            (updated if is_updated else self._still).append(part)
        optimizer.bind(updated, partition.flat_weights(), partition.axis, axes.world, axes.tp.rank)

    @property
    def slices(self) -> list[Slice]:
        """What this rank updates."""
        return self.optimizer.slices

    def owned_states(self) -> Iterator[OwnedState]:
        """What this rank keeps whole; where nothing is divided every replica keeps the same."""
        return self.optimizer.owned_states()

    def owned_parts(self) -> Iterator[Part]:
        """What this rank stands for: what it alone keeps, or else weights in turns with its replicas."""
        is_crumbs = self._partition.divides_weights and self._partition.shards(is_expert=False).size > MAX_SLICES
        if is_crumbs or not self._partition.divides_state:
            yield from self._in_turns(is_live=not is_crumbs)
        else:
            for part in (*self.slices, *self._still):
                if not part.is_copy:
                    yield from parts_of_slice(part)
        for state in self.optimizer.owned_states():
            if self._stands_for(state):
                for kind, (rectangle, tensor) in state.tensors.items():
                    yield Part(state.unit.weight.name, rectangle, {kind: tensor}, state.is_live)

    def held_weights(self) -> list[HeldWeight]:
        """Every parameter, or the part of it that is left here where weights are divided."""
        found = []
        for name, parameter in self._parameters.items():
            is_cut_by_tp = getattr(parameter, CUT_MARK, False)
            copies = self._partition.weight_copies(is_expert=getattr(parameter, EXPERT_MARK))
            over = (copies, *(() if is_cut_by_tp else (self._axes.tp,)))
            found.append(HeldWeight(name, self._partition.held(parameter), over))
        return found

    def read(self) -> Iterator[LocalState]:
        """Yield every canonical weight with its elementwise state, one in memory at a time. Collective over dp."""
        slices: dict[tuple[str, str], list[Slice]] = {}
        for part in (*self.slices, *self._still):
            slices.setdefault((part.local.parameter_name, part.local.weight.name), []).append(part)
        for local in local_weights(self._stage):
            mine = slices.get((local.parameter_name, local.weight.name), [])
            kinds = ("weight", *self.optimizer.elementwise_kinds(local.weight))
            shape = local.rectangle.shape
            yield LocalState(local, {kind: self._whole(local.weight, shape, mine, kind) for kind in kinds})

    def write(self, weights: WeightSource, state: dict[str, WeightSource], num_updates: int) -> None:
        """Set every weight and all state from sources by kind, each rank what it keeps; padding stays zero."""
        self.optimizer.num_updates = num_updates
        self._stage.precision.forget_weights()
        sources = {"weight": weights, **state}
        for part in (*self.slices, *self._still):
            for kind in part.tensors:
                _set(part, kind, sources[kind])

        def read(weight: Weight, kind: str, rectangle: Rectangle, shape: tuple[int, ...]) -> Tensor:
            return sources[kind].read(replace(weight, shape=shape), rectangle)

        self.optimizer.load_owned_states(read)
        self._partition.refresh(weights)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within it, weights whose rule averages are their averages. Collective. What fails within it leaves masters as
        they were, but not what was gathered from them: the run is over."""
        beta = self.optimizer.beta
        if beta is None:
            yield
            return
        flats, kept = self._partition.flat_weights(), self._partition.spare()
        for flat, copy in zip(flats, kept, strict=True):
            copy.copy_(flat.detach())
        try:
            for part in self.slices:
                put_average(part, beta)
            self._compute_anew()
            yield
        finally:
            for flat, copy in zip(flats, kept, strict=True):
                flat.data.copy_(copy)
        self._compute_anew()

    def gather(self, weight: Weight, shape: tuple[int, ...]) -> Tensor:
        """What the ranks of a stage keep of a weight, brought together: of `shape`, this rank's part of the model.
        Collective over dp."""
        mine = [part for part in (*self.slices, *self._still) if part.local.weight.name == weight.name]
        return self._whole(weight, shape, mine, "weight")

    def _compute_anew(self) -> None:
        """Let what computes follow what the optimizer works on. Collective."""
        self._stage.precision.forget_weights()
        self._partition.refresh(_Gathered(self), with_still=False)

    def set_weights(self, weights: WeightSource) -> None:
        """Set weights alone, which nothing has been computed with yet."""
        for part in (*self.slices, *self._still):
            _set(part, "weight", weights)

    def _in_turns(self, *, is_live: bool) -> Iterator[Part]:
        """Whole weights, each from one of the replicas."""
        for number, state in enumerate(self.read()):
            replicas = self._replicas_of(state.local.weight)
            is_ours = number % replicas.size == replicas.rank and not is_copy_in_model(state.local, self._axes)
            if is_ours and math.prod(state.local.rectangle.shape) > 0:
                yield Part(state.local.weight.name, state.local.rectangle, state.tensors, is_live)

    def _stands_for(self, state: OwnedState) -> bool:
        """Whether no other rank with the same state comes first."""
        is_at_end = is_copy_at_end(state.unit.weight, self._axes)
        copies = self._partition.state_copies(is_expert=state.unit.weight.expert is not None)
        is_other_replica = copies.rank != 0
        return not (is_at_end or is_other_replica or state.unit.replica != 0)

    def _whole(self, weight: Weight, shape: tuple[int, ...], slices: list[Slice], kind: str) -> Tensor:
        """All numbers of a weight's local part: a view where nothing is divided, else gathered."""
        if not self._partition.divides_state and slices:
            return slices[0].tensors[kind].view(shape)
        device = next(iter(self._parameters.values())).device
        whole = torch.zeros(math.prod(shape), device=device)
        for part in slices:
            whole[part.start : part.stop] = part.tensors[kind]
        return all_reduce(whole, self._partition.shards(is_expert=weight.expert is not None)).view(shape)

    def _replicas_of(self, weight: Weight) -> Axis:
        """The ranks that hold the same."""
        return self._axes.replicas_of(is_expert=weight.expert is not None)


class _Gathered:
    """A stage's own weights as a source, which all replicas read in one order."""

    def __init__(self, state: StageState):
        self._state = state

    def read(self, weight: Weight, rectangle: Rectangle) -> Tensor:
        return self._state.gather(weight, rectangle.shape)


def _set(part: Slice, kind: str, source: WeightSource) -> None:
    rows, skipped = _rows_of(part)
    numbers, tensor = source.read(part.local.weight, rows).reshape(-1), part.tensors[kind]
    copy_numbers(tensor, numbers[skipped : skipped + tensor.numel()])


def _rows_of(part: Slice) -> tuple[Rectangle, int]:
    """The rows of the whole weight that a slice touches, and how many numbers of the first come before it."""
    start, shape = part.local.rectangle.start, part.local.rectangle.shape
    row_size = math.prod(shape[1:])
    first, last = part.start // row_size, -(-part.stop // row_size)
    return Rectangle((start[0] + first, *start[1:]), (last - first, *shape[1:])), part.start - first * row_size
