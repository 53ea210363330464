"""Safetensors files written as a stream, so that a file may be larger than memory.

    8 bytes        length of the header
    header         JSON: name, number format, shape and place of every tensor; known before the first number is read
    numbers        tensor after tensor, each in blocks of rows

`safetensors.torch.save_file` wants all tensors of a file at once. Here the largest thing in memory is a block of some
MB, whatever the size of the file, and the checksum of the file is made on the way. While a thread writes a block the
next one is read and converted, so that neither the disk nor the conversion waits for the other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from megalite.checkpoint.format import FileRecord
from megalite.checkpoint.hf.layout import one_thread

CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""Safetensors' names of number formats."""

ALIGNMENT = 8
"""The numbers begin at a multiple of this."""


@dataclass(frozen=True)
class Entry:
    """A tensor of a file to be."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_stream(path: Path, entries: Sequence[Entry], read: Callable[[str], Iterable[Tensor]]) -> FileRecord:
    """Write a safetensors file; it is on the disk afterwards.

    Args:
        path: of the file.
        entries: its tensors, in their order.
        read: yields a tensor, by name, in blocks that lie one behind the other in memory's order.

    Returns:
        Size and checksum of what was meant to be written.
    """
    digest, size = xxhash.xxh3_128(), 0
    with open(path, "wb", buffering=0) as file, ThreadPoolExecutor(1) as thread, one_thread():

        def put(part: memoryview) -> None:
            _write_whole(file.fileno(), part)
            digest.update(part)

        last: Future[None] | None = None
        for part in _parts(entries, read):
            if last is not None:
                last.result()
            last = thread.submit(put, part)
            size += part.nbytes
        if last is not None:
            last.result()
        os.fsync(file.fileno())
    return FileRecord(size, digest.hexdigest())


def is_finite(numbers: Tensor) -> bool:
    """Whether no number is NaN or infinite: a finite sum proves it in one pass, else each is looked at."""
    total = numbers.sum(dtype=torch.float32)
    return bool(torch.isfinite(total)) or bool(torch.isfinite(numbers).all())


def _parts(entries: Sequence[Entry], read: Callable[[str], Iterable[Tensor]]) -> Iterator[memoryview]:
    """The bytes of a file, in order."""
    yield memoryview(_header(entries))
    for entry in entries:
        left = entry.num_bytes
        for block in read(entry.name):
            assert block.dtype == entry.dtype, entry.name
            yield memoryview(block.contiguous().view(torch.uint8).numpy()).cast("B")
            left -= block.nbytes
        assert left == 0, f"{entry.name}: {left} bytes were not yielded"


def _header(entries: Sequence[Entry]) -> bytes:
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        end = offset + entry.num_bytes
        fields[entry.name] = {
            "dtype": CODES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _write_whole(descriptor: int, part: memoryview) -> None:
    """A write may take less than it was given."""
    while part:
        part = part[os.write(descriptor, part) :]
