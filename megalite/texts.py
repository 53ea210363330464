"""Many texts as two arrays: their UTF-8 bytes end to end, and where each begins.

    buffer   [b|e| |q|u|i|e|t|g|o|o|n]      uint8  [bytes]
    offsets  [0, 8, 12]                     int64  [texts + 1]

It is the layout of an Arrow string column, so nothing is copied on the way in from Parquet or back, and it is what the
compiled kernels take: they run over bytes and never make a Python object for each document.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa


class Texts:
    """Texts laid end to end.

    Args:
        buffer: uint8 [bytes], valid UTF-8 between any two offsets.
        offsets: int64 [texts + 1], growing; the first need not be 0.
    """

    __slots__ = ("buffer", "offsets")

    def __init__(self, buffer: np.ndarray, offsets: np.ndarray):
        self.buffer = buffer
        self.offsets = offsets

    @classmethod
    def of(cls, texts: Iterable[str | bytes]) -> Texts:
        """Texts from strings, or from bytes that are UTF-8 already."""
        encoded = [text.encode() if isinstance(text, str) else text for text in texts]
        offsets = np.zeros(len(encoded) + 1, np.int64)
        np.cumsum([len(text) for text in encoded], out=offsets[1:])
        return cls(np.frombuffer(b"".join(encoded), np.uint8), offsets)

    @classmethod
    def from_arrow(cls, column: pa.Array | pa.ChunkedArray) -> Texts:
        """Texts of a string column without nulls; no copy when it is one chunk of large_string."""
        import pyarrow as pa  # here, because training ranks open tokens and need no Arrow: 25 MB each

        if isinstance(column, pa.ChunkedArray):
            column = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
        column = column.cast(pa.large_string())
        assert column.null_count == 0
        _, offsets, buffer = column.buffers()
        ends = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1]
        data = np.frombuffer(buffer, np.uint8) if buffer is not None else np.zeros(0, np.uint8)
        return cls(data, ends if ends.size else np.zeros(1, np.int64))

    def to_arrow(self) -> pa.Array:
        """The texts as a large_string column that shares this memory."""
        import pyarrow as pa

        buffers = [None, pa.py_buffer(np.ascontiguousarray(self.offsets)), pa.py_buffer(self.buffer)]
        return pa.Array.from_buffers(pa.large_string(), len(self), buffers)

    def __len__(self) -> int:
        return self.offsets.size - 1

    def __getitem__(self, index: int) -> str:
        return self.bytes_of(index).decode()

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))

    def bytes_of(self, index: int) -> bytes:
        """The UTF-8 of one text."""
        return self.buffer[self.offsets[index] : self.offsets[index + 1]].tobytes()

    @property
    def num_bytes(self) -> int:
        """Bytes of all texts."""
        return int(self.offsets[-1] - self.offsets[0])

    @property
    def lengths(self) -> np.ndarray:
        """Bytes of each text, int64 [texts]."""
        return np.diff(self.offsets)

    def take(self, indices: np.ndarray) -> Texts:
        """The chosen texts, copied.

        Args:
            indices: int64 [chosen] positions, or a bool [texts] mask.
        """
        import pyarrow as pa

        column = self.to_arrow()
        chosen = column.filter(pa.array(indices)) if indices.dtype == bool else column.take(pa.array(indices))
        return Texts.from_arrow(chosen)


class Patch(NamedTuple):
    """Bytes to put in the place of buffer[start:end], which lies inside one document."""

    document: int
    start: int
    end: int
    replacement: bytes


def splice(texts: Texts, patches: Sequence[Patch]) -> Texts:
    """The texts with the patches in their places; without patches, the texts themselves.

    Args:
        texts: not changed.
        patches: ascending, none over another.
    """
    if not patches:
        return texts
    memory = np.ascontiguousarray(texts.buffer).data
    pieces: list[memoryview | bytes] = []
    lengths = texts.lengths
    place = int(texts.offsets[0])
    for patch in patches:
        assert place <= patch.start <= patch.end
        pieces += (memory[place : patch.start], patch.replacement)
        lengths[patch.document] += len(patch.replacement) - (patch.end - patch.start)
        place = patch.end
    pieces.append(memory[place : int(texts.offsets[-1])])
    offsets = np.zeros(len(texts) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return Texts(np.frombuffer(b"".join(pieces), np.uint8), offsets)
