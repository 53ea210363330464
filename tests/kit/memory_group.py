"""Collectives between the ranks of a test over shared memory: what gloo does, in a twentieth of the time.

A message of gloo's between two processes of one machine takes a millisecond, with four on two cores five, and tests of
layouts send tens of thousands. Here it is a copy. Reductions add up in the order of ranks, in the tensors' own format.
What a program gets from `torch.distributed` is otherwise the same; `tests/kit/test_memory_group.py` holds it to gloo.
Receives are there when they are waited for, everything else when the call returns.
"""

from __future__ import annotations

import itertools
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.futures import Future

from tests.kit.board import SLOT_BYTES, Board, board_bytes

NAME = "shared_memory"
"""Of the backend."""

SHARED = Path("/dev/shm")

Combine = Callable[[Tensor, Tensor], Any]

COMBINE: tuple[tuple[Any, Combine], ...] = (
    (dist.ReduceOp.SUM, Tensor.add_),
    (dist.ReduceOp.AVG, Tensor.add_),
    (dist.ReduceOp.PRODUCT, Tensor.mul_),
    (dist.ReduceOp.MAX, lambda total, part: torch.maximum(total, part, out=total)),
    (dist.ReduceOp.MIN, lambda total, part: torch.minimum(total, part, out=total)),
)
"""In place. Torch's operations can be compared, and not hashed."""


class MemoryGroup(dist.ProcessGroup):
    """A group whose ranks share a `Board`. The names of methods are those by which torch calls them."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta):
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        if rank == 0:
            file, path = tempfile.mkstemp(prefix="ranks-", dir=SHARED if SHARED.is_dir() else None)
            os.ftruncate(file, board_bytes(size))
            os.close(file)
            store.set("board", path)
        self._path = store.get("board").decode()
        self._board = Board(Path(self._path), rank, size, timeout.total_seconds())
        self._messages: dict[str, int] = {}
        self.barrier()
        if rank == 0:
            os.unlink(self._path)

    def getBackendName(self) -> str:
        return NAME

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    pg_name = group_name

    def allreduce(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        for tensor in tensors:
            with _flat(tensor) as flat:
                self._reduce(flat, opts.reduceOp)
        return _done(tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        for tensor in tensors:
            total = tensor.detach().clone().view(-1)
            self._reduce(total, opts.reduceOp)
            if self._rank == opts.rootRank:
                tensor.detach().copy_(total.view(tensor.shape))
        return _done(tensors)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        is_source = self._rank == opts.rootRank
        for tensor in tensors:
            with _flat(tensor) as flat:
                for piece in _pieces(_bytes(flat)):
                    self._board.post(piece if is_source else None)
                    if not is_source:
                        piece.copy_(self._board.read(opts.rootRank, piece.numel()))
                    self._board.release()
        return _done(tensors)

    def allgather(self, outputs: list, inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        for parts, tensor in zip(outputs, inputs, strict=True):
            self._gather(parts, tensor)
        return _done(outputs)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        self._gather(output.detach().view(-1).chunk(self._size), tensor)
        return _done(output)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: list, inputs: list, opts: Any = None) -> dist.Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, tensor)
        return _done(outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: list, inputs: Sequence[Tensor], opts: Any) -> dist.Work:
        for number, tensor in enumerate(inputs):
            others = [torch.empty_like(tensor) for _ in range(self._size)]
            self._gather(outputs[number] if self._rank == opts.rootRank else others, tensor)
        return _done(outputs)

    def reduce_scatter(self, outputs: list, inputs: list, opts: Any) -> dist.Work:
        for output, parts in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, torch.stack([part.detach() for part in parts]), opts)
        return _done(outputs)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any) -> dist.Work:
        total = tensor.detach().clone().view(-1)
        self._reduce(total, opts.reduceOp)
        output.detach().copy_(total.chunk(self._size)[self._rank].view(output.shape))
        return _done(output)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: list, inputs: list, opts: Any) -> dist.Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, tensor, opts)
        return _done(outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> dist.Work:
        """Rows of the first dim to every rank; no sizes are equal ones."""
        sizes = torch.tensor(input_sizes or [tensor.shape[0] // self._size] * self._size)
        tables = [torch.empty_like(sizes) for _ in range(self._size)]
        self._gather(tables, sizes)
        row_bytes = output.element_size() * math.prod(output.shape[1:])
        stops = [[0, *itertools.accumulate(row_bytes * rows for rows in table.tolist())] for table in tables]
        mine = [slice(each[self._rank], each[self._rank + 1]) for each in stops]
        whole = output.detach() if output.is_contiguous() else torch.empty_like(output)
        targets = _bytes(whole.view(-1)).split([each.stop - each.start for each in mine])
        self._gather_parts(targets, mine, _bytes(tensor.detach().contiguous().view(-1)), max(map(max, stops)))
        if not output.is_contiguous():
            output.detach().copy_(whole)
        return _done(output)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> dist.Work:
        self._board.post(None)
        for rank in range(self._size):
            self._board.read(rank, 0)
        self._board.release()
        return _done(None)

    def send(self, tensors: Sequence[Tensor], to: int, tag: int = 0) -> dist.Work:
        path = self._message(self._rank, to, tag)
        path.with_suffix(".new").write_bytes(_bytes(tensors[0].detach().contiguous().view(-1)).numpy())
        path.with_suffix(".new").rename(path)
        self._board.has_sent()
        return _done(tensors)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int = 0) -> dist.Work:
        return _Receiving(self._board, source, self._message(source, self._rank, tag), tensors[0])

    def _message(self, source: int, to: int, tag: int) -> Path:
        """The file of the next message between two ranks."""
        way = f"{self._path}-{source}-{to}-{tag}"
        self._messages[way] = self._messages.get(way, 0) + 1
        return Path(f"{way}-{self._messages[way]}.message")

    def _reduce(self, flat: Tensor, operation: Any) -> None:
        combine = next(function for known, function in COMBINE if operation == known)
        for piece in _pieces(_bytes(flat)):
            self._board.post(piece)
            total = piece.view(flat.dtype)
            parts = [self._board.read(rank, piece.numel()).view(flat.dtype) for rank in range(self._size)]
            total.copy_(parts[0])
            for part in parts[1:]:
                combine(total, part)
            self._board.release()
            if operation == dist.ReduceOp.AVG:
                total.div_(self._size)

    def _gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        """Everybody's tensor, of one shape, into the outputs."""
        self._gather_all_of([output.detach() for output in outputs], tensor)

    def _gather_all_of(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        """The same where shapes differ: each output has the shape of its rank's tensor."""
        mine = _bytes(tensor.detach().contiguous().view(-1))
        found = [output if output.is_contiguous() else torch.empty_like(output) for output in outputs]
        targets = [_bytes(output.view(-1)) for output in found]
        everything = [slice(0, target.numel()) for target in targets]
        self._gather_parts(targets, everything, mine, max(target.numel() for target in targets))
        for output, whole in zip(outputs, found, strict=True):
            if output is not whole:
                output.copy_(whole)

    def _gather_parts(self, targets: Sequence[Tensor], parts: Sequence[slice], mine: Tensor, most: int) -> None:
        """A part of each rank's bytes into a target; the longest rank has so many."""
        for start in range(0, most, SLOT_BYTES):
            self._board.post(mine[start : start + SLOT_BYTES])
            for rank, (target, part) in enumerate(zip(targets, parts, strict=True)):
                first, last = max(start, part.start), min(start + SLOT_BYTES, part.stop)
                if first < last:
                    found = self._board.read(rank, last - start)[first - start :]
                    target[first - part.start : last - part.start].copy_(found)
                else:
                    self._board.read(rank, 0)
            self._board.release()


class _Receiving(dist.Work):
    """A message that is read when it is waited for."""

    def __init__(self, board: Board, source: int, path: Path, tensor: Tensor):
        super().__init__()
        self._board, self._source, self._path, self._tensor, self._is_read = board, source, path, tensor, False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if not self._is_read:
            self._board.wait_for_message(self._source, self._path.exists)
            content = torch.frombuffer(bytearray(self._path.read_bytes()), dtype=self._tensor.dtype)
            self._tensor.detach().copy_(content.view(self._tensor.shape))
            self._path.unlink()
            self._is_read = True
        return True

    def is_completed(self) -> bool:
        return self._is_read or self._path.exists()


class _flat:
    """A tensor's numbers in a row, which are the tensor's own again at the end."""

    def __init__(self, tensor: Tensor):
        self._tensor = tensor.detach()
        self._whole = self._tensor.contiguous()

    def __enter__(self) -> Tensor:
        return self._whole.view(-1)

    def __exit__(self, *_: object) -> None:
        if self._whole.data_ptr() != self._tensor.data_ptr():
            self._tensor.copy_(self._whole)


def _bytes(flat: Tensor) -> Tensor:
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)


def _pieces(content: Tensor) -> Iterator[Tensor]:
    """What fits into a slot at a time."""
    return iter(content.split(SLOT_BYTES)) if content.numel() else iter(())


def _done(result: Any) -> dist.Work:
    future: Future = Future()
    future.set_result(result)
    return c10d._create_work_from_future(future)


def register() -> None:
    """Make the backend known to this process."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, MemoryGroup, devices=["cpu"])
