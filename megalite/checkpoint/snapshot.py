"""A rank's share of a checkpoint, ready to be written: its tensors, and the pieces that say what they are.

A save that training waits for writes live memory where it is on the CPU already. A save in the background needs a copy.
Weights and moments change only at the end of a step, so there is time to make it while the next step runs forward and
backward; only an update that comes earlier has to wait (`Engine.hooks`).

The copy goes into one buffer that is kept: from the second save on there is nothing to allocate and no page to fault
in. On CUDA its pages are locked and a stream of its own does the copying, as fast as the bus and beside the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megalite.checkpoint.format import Piece, tensor_name
from megalite.checkpoint.precision_state import precision_parts
from megalite.checkpoint.shares import file_name
from megalite.engine.parts import Part
from megalite.engine.protocol import Engine
from megalite.optim.slices import copy_numbers
from megalite.parallel.axes import Axes


@dataclass
class Share:
    """What one rank writes."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """By key in the rank's file; contiguous, fp32, on the CPU. Not filled before `copy`."""
    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    """By name of the tensor that they are pieces of."""
    pending: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """What is to be copied where, (to, from), before the next update."""
    is_final: torch.cuda.Event | None = None
    """On CUDA: when all that has been queued so far is done, and the state is what is to be saved."""

    def copy(self) -> None:
        """Copy what is pending. A thread may do it."""
        device = next((source.device for _, source in self.pending if source.is_cuda), None)
        if self.is_final is None or device is None:  # of an offloaded optimizer all is the host's
            for target, source in self.pending:
                copy_numbers(target, source)
        else:
            stream = torch.cuda.Stream(device)
            stream.wait_event(self.is_final)
            with torch.cuda.stream(stream):
                for target, source in self.pending:
                    copy_numbers(target, source)
            stream.synchronize()
        self.pending.clear()


def saved_parts(engine: Engine, axes: Axes) -> Iterator[Part]:
    """All that this rank writes: the parts of the model that it stands for, and what its stage's precision remembers.
    Collective."""
    yield from precision_parts(engine, axes)
    yield from engine.owned_parts()


def live_share(engine: Engine, axes: Axes) -> Share:
    """This rank's share as it lies in memory, to be written before the next step. Collective over dp."""
    share = Share()
    for part in saved_parts(engine, axes):
        tensors = {kind: tensor.to("cpu", torch.float32).contiguous() for kind, tensor in part.tensors.items()}
        _add(share, axes.global_rank, part, tensors)
    return share


class Snapshots:
    """Copies of this rank's share in host memory, each taking the place of the one before.

    At most one copy of the share exists; whoever takes the next must know that the last one has been written.
    """

    def __init__(self, engine: Engine, axes: Axes):
        self._engine, self._axes = engine, axes
        self._is_cuda = next(engine.stage.parameters()).is_cuda
        self._buffer: Tensor | None = None
        self._is_locked = False

    def take(self) -> Share:
        """The share of now, to be copied before the next update. Collective over dp."""
        if self._buffer is None:
            self._buffer = self._allocate()
        share = Share()
        for part, tensors in self._places(self._buffer):
            _add(share, self._axes.global_rank, part, tensors)
            copies = [(tensors[kind], source) for kind, source in part.tensors.items()]
            if part.is_live:
                share.pending += copies
                continue
            for target, source in copies:  # made for this moment
                copy_numbers(target, source)
        if self._is_cuda and share.pending:
            share.is_final = torch.cuda.Event()
            share.is_final.record()
        elif self._is_cuda:
            torch.cuda.synchronize()  # the copies are queued
        return share

    def close(self) -> None:
        """Give the memory back."""
        if self._is_locked and self._buffer is not None:
            torch.cuda.cudart().cudaHostUnregister(self._buffer.data_ptr())
        self._buffer, self._is_locked = None, False

    def _places(self, buffer: Tensor) -> Iterator[tuple[Part, dict[str, Tensor]]]:
        """Each part, and where in the buffer its tensors go."""
        offset = 0
        for part in saved_parts(self._engine, self._axes):
            tensors = {}
            for kind, tensor in part.tensors.items():
                tensors[kind] = buffer.narrow(0, offset, tensor.numel()).view(tensor.shape)
                offset += tensor.numel()
            yield part, tensors

    def _allocate(self) -> Tensor:
        """A buffer for the whole share. Torch's own pinned memory would be rounded up to a power of two."""
        parts = saved_parts(self._engine, self._axes)
        size = sum(tensor.numel() for part in parts for tensor in part.tensors.values())
        buffer = torch.empty(size, dtype=torch.float32)
        if size and self._is_cuda:
            status = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)
            self._is_locked = int(status) == 0  # without it the copy is right, and slower
            if not self._is_locked:
                _forget_last_error()
        return buffer


def _forget_last_error() -> None:
    """Take away CUDA's last error, which it keeps for a thread until somebody asks: the next kernel to be launched
    would be blamed for it. Torch asks at every launch, and raises what it finds."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def _add(share: Share, rank: int, part: Part, tensors: dict[str, Tensor]) -> None:
    """Put a part into a share: name its tensors and say which pieces they are."""
    file, rectangle = file_name(rank), part.rectangle
    for kind, tensor in tensors.items():
        name = tensor_name(kind, part.weight_name)
        key = f"{name}@{','.join(map(str, rectangle.start))}"
        share.tensors[key] = tensor
        share.pieces.setdefault(name, []).append(Piece(file, key, rectangle.start, rectangle.shape))
