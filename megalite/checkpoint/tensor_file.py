"""Safetensors files, written as a stream with their checksum, and looked up by offset.

    8 bytes: length of the header | header: JSON, what lies where | the tensors' bytes, end to end

The safetensors package wants all tensors of a file at once, copies each, and the checksum would then cost a second
reading of the whole file. Here bytes go from a tensor's own memory to the checksum and to the kernel, block by block;
both release the interpreter's lock, so that a thread can do it while training goes on, and a merge needs a slab of one
tensor in memory, not a file. The header comes first, so names, types and shapes must be known before the numbers.
Reading stays the package's, except where bytes are shared between checkpoints and found by offset (`differential.py`).
"""

from __future__ import annotations

import ctypes
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
import xxhash
from torch import Tensor

from megalite.checkpoint.format import FileRecord
from megalite.errors import CheckpointError

DTYPE_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int32: "I32",
    torch.int64: "I64",
}
"""safetensors' names."""

BLOCK_BYTES = 4 * 2**20
"""Written at once: small enough that the checksum finds it in the cache, large enough that calls cost nothing."""

WRITEBACK_BYTES = 32 * 2**20
"""Every so many bytes the kernel is asked to begin writing them to the disk. Otherwise it begins when the file is
synced, and the disk, idle until then, doubles the time of a save."""

SYNC_FILE_RANGE_WRITE = 2
"""Begin to write, wait for nothing."""

HEADER_ALIGNMENT = 8
"""The header is padded with blanks, so that the tensors' bytes begin at a multiple of this."""
MAX_HEADER_BYTES = 100 * 10**6
"""The safetensors package's own limit."""


@dataclass(frozen=True)
class Entry:
    """A tensor that a file will hold."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class HashedFile:
    """A new file whose checksum grows with it; on the disk once its `with` block has ended in peace."""

    def __init__(self, path: Path):
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115  (closed by __exit__)
        self._digest = xxhash.xxh3_128()
        self._num_handed_over = 0
        self.num_bytes = 0

    def write(self, data: np.ndarray | memoryview | bytes) -> None:
        """Append bytes."""
        view = data.data if isinstance(data, np.ndarray) else memoryview(data)
        for start in range(0, len(view), BLOCK_BYTES):
            block = view[start : start + BLOCK_BYTES]
            self._digest.update(block)
            while block:  # a write may take less than it was given
                num_written = self._file.write(block)
                self.num_bytes += num_written
                block = block[num_written:]
            if self.num_bytes - self._num_handed_over >= WRITEBACK_BYTES:
                self._begin_writeback()

    def _begin_writeback(self) -> None:
        """Have the disk begin with what was written since the last time. The pages stay in the cache, for a restart."""
        start, self._num_handed_over = self._num_handed_over, self.num_bytes
        sync_file_range = _find_sync_file_range()
        if sync_file_range is not None:  # a hint: what it answers is of no matter
            sync_file_range(self._file.fileno(), start, self.num_bytes - start, SYNC_FILE_RANGE_WRITE)

    @property
    def record(self) -> FileRecord:
        """Size and checksum of what was written."""
        return FileRecord(self.num_bytes, self._digest.hexdigest())

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                os.fsync(self._file.fileno())
        finally:
            self._file.close()


@lru_cache(maxsize=1)
def _find_sync_file_range() -> Callable[..., int] | None:
    """Linux's call of that name, which Python does not have; None elsewhere."""
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function


class TensorFile(HashedFile):
    """A safetensors file being written: first all entries are named, then their bytes are appended in that order."""

    def __init__(self, path: Path, entries: list[Entry]):
        super().__init__(path)
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for entry in entries:
            end = offset + entry.num_bytes
            dtype = DTYPE_NAMES[entry.dtype]
            header[entry.key] = {"dtype": dtype, "shape": list(entry.shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode("utf-8")
        text += b" " * (-len(text) % HEADER_ALIGNMENT)
        self.write(len(text).to_bytes(8, "little") + text)
        self._expected_bytes = self.num_bytes + offset

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        assert kind is not None or self.num_bytes == self._expected_bytes, "not what the header promises"


def group_by_size(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """Cut a sequence of named things into runs of at most `max_bytes`; what is larger by itself is a run of its own."""
    groups: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not groups or size > room:
            groups.append([])
            room = max_bytes
        groups[-1].append(name)
        room -= size
    return groups


def as_bytes(tensor: Tensor) -> np.ndarray:
    """The bytes of a contiguous CPU tensor, in its own memory."""
    assert tensor.is_contiguous(), tensor.shape
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def offsets(path: Path) -> dict[str, tuple[int, int]]:
    """Where each tensor of a safetensors file lies: its first byte in the file, and its number of bytes.

    Raises:
        CheckpointError: the file is missing or its header is damaged.
    """
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(MAX_HEADER_BYTES, path.stat().st_size):
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        found = {}
        for key, entry in header.items():
            start, end = entry["data_offsets"]
            found[key] = (8 + length + start, end - start)
        return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
