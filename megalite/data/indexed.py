"""Token files in Megatron-LM's `.bin/.idx` format: a writer that commits at the end, a reader that maps them.

    prefix.bin   the tokens of all sequences, end to end
    prefix.idx   magic 9 bytes | version u64 | dtype code u8 | number of sequences u64 | number of borders u64
                 | sequence lengths i32 [s] | byte offsets into .bin i64 [s] | document borders i64 [d + 1]

    prefix.weights   where labels do not all count alike: how much each token weighs as a label, f16 [tokens]. Ours; a
                     pair of Megatron's has none, and reads the other two files as ever

A document is a run of sequences, borders[d] to borders[d + 1]; we write one sequence a document and read any number.
The offsets grow, so the document of a token is found by bisection in the mapped file: nothing is built or held in
memory, however many documents there are.

Reading a mapped file that someone has shortened in the meantime kills the process (SIGBUS), and so does a network disk
that loses the file; no program can turn that into an error afterwards. So sizes are compared when a pair is opened, and
`check_unchanged` compares them again: the loader calls it before every stretch of samples. What is cut off between that
look and the read is not caught.
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
from bisect import bisect_right
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megalite.data.index_checks import index_damage
from megalite.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")

DTYPES: dict[int, np.dtype] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.int8),
    3: np.dtype(np.int16),
    4: np.dtype(np.int32),
    5: np.dtype(np.int64),
    8: np.dtype(np.uint16),
}
"""Megatron's codes of integer types; 6 and 7 are floats, which are no tokens."""

CODES = {dtype: code for code, dtype in DTYPES.items()}

COPY_BYTES = 1 << 24

DOCUMENTS_AT_ONCE = 1 << 16

WEIGHT_DTYPE = np.dtype(np.float16)
"""Of loss weights: 11 bits each, 0 for a token that is not learnt."""

SMALLEST_WEIGHT = float(np.finfo(WEIGHT_DTYPE).tiny)
LARGEST_WEIGHT = 1024.0
"""Between them a weight keeps its 11 bits, and a sum over any global batch is exact in float64."""


def bin_path(prefix: Path) -> Path:
    """The file of tokens of a pair."""
    return prefix.parent / f"{prefix.name}.bin"


def idx_path(prefix: Path) -> Path:
    """The index file of a pair."""
    return prefix.parent / f"{prefix.name}.idx"


def weights_path(prefix: Path) -> Path:
    """The file of loss weights beside a pair."""
    return prefix.parent / f"{prefix.name}.weights"


class IndexedWriter:
    """Writes a pair, one sequence a document; use as a context manager.

    Both files grow under `.partial` names and are renamed when the block ends well, the index last: a pair with an
    index is whole.

    Args:
        prefix: path of the pair without `.bin` or `.idx`.
        dtype: type of the tokens, from `token_dtype`.
    """

    def __init__(self, prefix: Path, dtype: np.dtype):
        self.prefix = prefix
        self.dtype = dtype
        self.num_documents = 0
        self.num_tokens = 0
        self._lengths: list[np.ndarray] = []
        self._bin_partial = prefix.with_name(prefix.name + ".bin.partial")
        self._idx_partial = prefix.with_name(prefix.name + ".idx.partial")

    def __enter__(self) -> IndexedWriter:
        self._file = open(self._bin_partial, "wb")
        return self

    def add(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents laid end to end.

        Args:
            tokens: [sum(lengths)] ids.
            lengths: [documents] tokens of each.
        """
        assert tokens.size == int(lengths.sum()), (tokens.size, lengths.sum())
        assert tokens.size == 0 or 0 <= tokens.min() <= tokens.max() <= np.iinfo(self.dtype).max
        self._file.write(np.ascontiguousarray(tokens, dtype=self.dtype).data)
        self._lengths.append(lengths.astype(np.int32))
        self.num_documents += lengths.size
        self.num_tokens += tokens.size

    def add_file(self, path: Path, lengths: np.ndarray) -> None:
        """Append documents whose tokens lie end to end in a file, in this writer's type.

        Args:
            path: the file of tokens.
            lengths: [documents] tokens of each.
        """
        assert path.stat().st_size == int(lengths.sum(dtype=np.int64)) * self.dtype.itemsize, path
        with open(path, "rb") as file:
            shutil.copyfileobj(file, self._file, COPY_BYTES)
        self._lengths.append(lengths.astype(np.int32))
        self.num_documents += lengths.size
        self.num_tokens += int(lengths.sum(dtype=np.int64))

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        try:
            self._file.close()
            if error_type is None:
                self._commit()
        finally:
            self._bin_partial.unlink(missing_ok=True)
            self._idx_partial.unlink(missing_ok=True)

    def _commit(self) -> None:
        lengths = np.concatenate([np.zeros(0, np.int32), *self._lengths])
        offsets = (np.cumsum(lengths, dtype=np.int64) - lengths) * self.dtype.itemsize
        borders = np.arange(lengths.size + 1, dtype=np.int64)
        with open(self._idx_partial, "wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, CODES[self.dtype], lengths.size, borders.size))
            for column in (lengths, offsets, borders):
                file.write(column.data)
        os.replace(self._bin_partial, bin_path(self.prefix))
        os.replace(self._idx_partial, idx_path(self.prefix))


class Stream(NamedTuple):
    """The mapped arrays of a pair, as the compiled kernels take them."""

    tokens: np.ndarray
    """[tokens], of the file's type."""
    offsets: np.ndarray
    """int64 [sequences]: where each begins in the token file, in bytes."""
    borders: np.ndarray
    """int64 [documents + 1]: first sequence of each document."""
    weights: np.ndarray
    """uint16 [tokens], the bits of each token's loss weight in float16; [0] where all count alike."""


class IndexedTokens:
    """A pair opened for reading: one long stream of tokens, and where its documents begin.

    Args:
        prefix: path of the pair without `.bin` or `.idx`.
        weighted: loss weights lie beside it.

    Raises:
        DataError: a file is missing, is no Megatron index, or they do not fit each other.
    """

    def __init__(self, prefix: Path, *, weighted: bool = False):
        self.prefix = prefix
        index, tokens = idx_path(prefix), bin_path(prefix)
        for path in (index, tokens):
            if not path.is_file():
                raise DataError(f"{path}: no such file; a token pair is {prefix.name}.bin and {prefix.name}.idx")
        self.dtype, num_sequences, num_borders = _read_header(index)
        self._maps = {index: _map(index)}
        columns = self._maps[index]
        self._lengths = np.frombuffer(columns, np.int32, num_sequences, HEADER.size)
        self._offsets = np.frombuffer(columns, np.int64, num_sequences, HEADER.size + 4 * num_sequences)
        self._borders = np.frombuffer(columns, np.int64, num_borders, HEADER.size + 12 * num_sequences)
        self.num_documents = num_borders - 1
        self.num_tokens = self._check_tokens(tokens)
        self._tokens = np.zeros(0, self.dtype)
        if self.num_tokens:
            self._maps[tokens] = _map(tokens)
            self._tokens = np.frombuffer(self._maps[tokens], self.dtype, self.num_tokens)
        bits = self._map_weights(weights_path(prefix)) if weighted and self.num_tokens else np.zeros(0, np.uint16)
        self.stream = Stream(self._tokens, self._offsets, self._borders, bits)

    def check_unchanged(self) -> None:
        """Compare the sizes of both files with those at opening, as far as the disk tells.

        A pair that was renamed, or replaced by another of its name, is still whole under our hands and passes.

        Raises:
            DataError: one was shortened or lost.
        """
        for path, mapped in self._maps.items():
            try:
                found = mapped.size()  # of the file, not of the map
            except OSError as error:
                raise DataError(f"{path}: lost while it was read: {error.strerror}; see to the disk") from error
            if found != len(mapped):
                raise DataError(
                    f"{path}: changed while it was read: {found} bytes now, {len(mapped)} when it was opened; copy or "
                    "make the pair again, and leave data alone that a run reads"
                )

    def damage(self, *, everything: bool = True) -> str:
        """What cannot be in the index; empty when nothing is wrong. See `index_checks.index_damage`."""
        columns = (self._lengths, self._offsets, self._borders)
        return index_damage(*columns, self.dtype.itemsize, everything=everything)

    def _check_tokens(self, path: Path) -> int:
        """Number of tokens, after a look at the index and comparing it with the size of the token file."""
        num_sequences = self._lengths.size
        if problem := self.damage(everything=False):
            raise DataError(f"{idx_path(self.prefix)}: damaged index: {problem}; make the pair again")
        expected = 0
        if num_sequences:
            expected = int(self._offsets[-1]) + int(self._lengths[-1]) * self.dtype.itemsize
        found = path.stat().st_size
        if found != expected:
            kind = "truncated" if found < expected else "longer than its index"
            raise DataError(
                f"{path}: {kind}: {found} bytes found, {expected} expected by {idx_path(self.prefix).name} "
                f"({num_sequences} sequences of {self.dtype}); copy or make the pair again"
            )
        return expected // self.dtype.itemsize

    def _map_weights(self, path: Path) -> np.ndarray:
        """The weights' bits, as many as there are tokens."""
        if not path.is_file():
            raise DataError(f"{path}: no such file; loss weights of {self.prefix.name}.bin are expected: make it again")
        found, expected = path.stat().st_size, self.num_tokens * WEIGHT_DTYPE.itemsize
        if found != expected:
            raise DataError(
                f"{path}: {found} bytes found, {expected} expected for {self.num_tokens} tokens; copy or make it again"
            )
        self._maps[path] = _map(path)
        return np.frombuffer(self._maps[path], np.uint16, self.num_tokens)

    @property
    def is_weighted(self) -> bool:
        """Whether tokens have loss weights."""
        return self.stream.weights.size > 0

    def read_weights(self, start: int, stop: int) -> np.ndarray:
        """Loss weights of tokens start..stop-1 of the stream, float32 [tokens]; ones where all count alike."""
        if not self.is_weighted:
            return np.ones(max(0, min(stop, self.num_tokens) - start), np.float32)
        return self.stream.weights[start:stop].view(WEIGHT_DTYPE).astype(np.float32)

    def has_label(self) -> bool:
        """Whether some document has two tokens, so that one of them has a next one, and one that counts. Looks until it
        finds one."""
        if self.is_weighted:
            firsts = range(0, self.num_tokens, DOCUMENTS_AT_ONCE)
            return any(self.stream.weights[first : first + DOCUMENTS_AT_ONCE].any() for first in firsts)
        starts = range(0, self.num_documents, DOCUMENTS_AT_ONCE)
        stretches = (self.document_starts(first, first + DOCUMENTS_AT_ONCE + 1) for first in starts)
        return any(bool((np.diff(stretch) > 1).any()) for stretch in stretches)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start..stop-1 of the stream, in the file's own type and without a copy."""
        return self._tokens[start:stop]

    def document_at(self, position: int) -> int:
        """The document that holds token `position` of the stream."""
        sequence = bisect_right(self._offsets, position * self.dtype.itemsize) - 1
        return bisect_right(self._borders, sequence) - 1

    def document_starts(self, first: int, stop: int) -> np.ndarray:
        """Stream positions at which documents first..stop-1 begin, int64; `num_documents` itself begins at the end, and
        so does, as for the kernels, one of which a damaged index says what cannot be."""
        sequences = self._borders[first:stop]
        inside = (sequences >= 0) & (sequences < self._offsets.size)
        starts = np.full(sequences.size, self.num_tokens, dtype=np.int64)
        starts[inside] = self._offsets[sequences[inside]] // self.dtype.itemsize
        return starts


def _read_header(path: Path) -> tuple[np.dtype, int, int]:
    """dtype, number of sequences and number of document borders of an index, its size checked."""
    with open(path, "rb") as file:
        header = file.read(HEADER.size)
    if len(header) < HEADER.size or header[: len(MAGIC)] != MAGIC:
        raise DataError(f"{path}: not a Megatron index: it does not begin with {MAGIC!r}")
    _, version, code, num_sequences, num_borders = HEADER.unpack(header)
    if version != VERSION:
        raise DataError(f"{path}: index version {version}; only version {VERSION} is known")
    if code not in DTYPES:
        raise DataError(f"{path}: dtype code {code} is no integer type; known are {sorted(DTYPES)}")
    expected = HEADER.size + 12 * num_sequences + 8 * num_borders
    found = path.stat().st_size
    if num_sequences and found == expected + num_sequences:
        raise DataError(f"{path}: a multimodal index, which has a mode for each sequence; only text can be read")
    if found != expected or num_borders < 1:
        raise DataError(
            f"{path}: damaged index: {found} bytes found, {expected} expected for {num_sequences} sequences and "
            f"{num_borders} document borders; copy or make the pair again"
        )
    return DTYPES[code], num_sequences, num_borders


def _map(path: Path) -> mmap.mmap:
    """Map a file that is not empty."""
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
