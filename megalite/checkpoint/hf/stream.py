"""Safetensors files written as a stream, so that a file may be larger than memory.

The largest thing in memory is a block of some MB, whatever the size of the file. While a thread writes a block
(`tensor_file.py`) the next one is read and converted, so that neither the disk nor the conversion waits for the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from megalite.checkpoint.format import FileRecord
from megalite.checkpoint.hf.layout import one_thread
from megalite.checkpoint.tensor_file import Entry, TensorFile


def write_stream(path: Path, entries: Sequence[Entry], read: Callable[[str], Iterable[Tensor]]) -> FileRecord:
    """Write a safetensors file; it is on the disk afterwards.

    Args:
        path: of the file.
        entries: its tensors, in their order.
        read: yields a tensor, by name, in blocks that lie one behind the other in memory's order.

    Returns:
        Size and checksum of what was written.
    """
    with TensorFile(path, list(entries)) as file, ThreadPoolExecutor(1) as thread, one_thread():
        last: Future[None] | None = None
        for part in _parts(entries, read):
            if last is not None:
                last.result()
            last = thread.submit(file.write, part)
        if last is not None:
            last.result()
    return file.record


def is_finite(numbers: Tensor) -> bool:
    """Whether no number is NaN or infinite: a finite sum proves it in one pass, else each is looked at."""
    total = numbers.sum(dtype=torch.float32)
    return bool(torch.isfinite(total)) or bool(torch.isfinite(numbers).all())


def _parts(entries: Sequence[Entry], read: Callable[[str], Iterable[Tensor]]) -> Iterator[memoryview]:
    """The bytes of a file behind its header, in order."""
    for entry in entries:
        left = entry.num_bytes
        for block in read(entry.key):
            assert block.dtype == entry.dtype, entry.key
            yield block.contiguous().view(torch.uint8).numpy().data.cast("B")
            left -= block.nbytes
        assert left == 0, f"{entry.key}: {left} bytes were not yielded"
