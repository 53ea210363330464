"""A rank's chunks as files: which goes where, neighbours joined, and where each piece lies in the end.

    chunks of a piece    [0  1  2 | 3  4 | 5]
    their homes           changed   link   still
    runs                 rank-00000.safetensors   from-…   rank-00000-still.safetensors

A piece that is one run in a file of ours is a plain tensor there, under its own key; of the others there are flat
parts, and the manifest tells their order (`format.Extent`). In a full save every piece is one run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import numpy as np
from torch import Tensor

from megalite.checkpoint.codec import ITEM_BYTES, PLAIN, pack
from megalite.checkpoint.differential import Matches, Storage
from megalite.checkpoint.format import Extent, FileRecord, Piece
from megalite.checkpoint.tensor_file import Entry, HashedFile, TensorFile, as_bytes

SAFETENSORS, PACKED = ".safetensors", ".zst"


@dataclass(frozen=True)
class ChunkRun:
    """Consecutive chunks of a piece with the same home."""

    first: int
    count: int
    home: str | Extent
    """The file that they go to, or where they lie already."""


class ChunkFiles:
    """The files that a rank writes for its tensors, given what is linked already."""

    def __init__(self, rank: int, tensors: dict[str, Tensor], matches: Matches, storage: Storage):
        """Decide where everything goes.

        Args:
            tensors: fp32, contiguous, on the CPU, by key.
        """
        self._tensors = tensors
        self._storage = storage
        self._runs = _runs(rank, tensors, matches, storage)
        self._extents: dict[str, list[tuple[int, Extent]]] = {}

    def write(self, folder: Path) -> dict[str, FileRecord]:
        """Write the files, none of which is there yet, and return their checksums.

        Raises:
            OSError: they could not be written.
        """
        homes = {run.home for runs in self._runs.values() for run in runs if isinstance(run.home, str)}
        write = self._write_packed if self._storage.compress else self._write_plain
        return {home: write(folder / home) for home in sorted(homes)}

    def place(self, piece: Piece) -> Piece:
        """The piece with where it lies, once all is written: under its key, or in extents."""
        runs, written = self._runs[piece.key], self._extents.get(piece.key, [])
        if len(runs) == len(written) == 1 and not self._storage.compress:
            return replace(piece, file=written[0][1].file)
        linked = [(run.first, run.home) for run in runs if isinstance(run.home, Extent)]
        in_order = sorted(linked + written, key=lambda pair: pair[0])
        return replace(piece, file="", key="", extents=tuple(extent for _, extent in in_order))

    def _write_plain(self, path: Path) -> FileRecord:
        """Write the runs of one file as safetensors."""
        entries, parts = [], []
        for key, run, data in self._parts(path.name):
            whole = len(self._runs[key]) == 1
            shape = tuple(self._tensors[key].shape) if whole else (len(data) // ITEM_BYTES,)
            name = key if whole else f"{key}+{run.first * self._storage.chunk_bytes}"
            entries.append(Entry(name, shape, self._tensors[key].dtype))
            parts.append((key, run, data))
        with TensorFile(path, entries) as file:
            for key, run, data in parts:
                self._note(key, run.first, Extent(path.name, file.num_bytes, len(data), len(data)))
                file.write(data)
        return file.record

    def _write_packed(self, path: Path) -> FileRecord:
        """Write the runs of one file chunk by chunk, compressed."""
        size = self._storage.chunk_bytes
        with HashedFile(path) as file:
            for key, run, data in self._parts(path.name):
                for index in range(run.count):
                    chunk = data[index * size : (index + 1) * size]
                    stored, codec = pack(chunk)
                    extent = Extent(path.name, file.num_bytes, len(chunk), len(stored), codec)
                    self._note(key, run.first + index, extent)
                    file.write(stored)
        return file.record

    def _parts(self, home: str) -> Iterator[tuple[str, ChunkRun, np.ndarray]]:
        """The runs that go to a file, and their bytes."""
        size = self._storage.chunk_bytes
        for key, runs in self._runs.items():
            data = as_bytes(self._tensors[key])
            for run in runs:
                if run.home == home:
                    yield key, run, data[run.first * size : (run.first + run.count) * size]

    def _note(self, key: str, first: int, extent: Extent) -> None:
        self._extents.setdefault(key, []).append((first, extent))


def _runs(rank: int, tensors: dict[str, Tensor], matches: Matches, storage: Storage) -> dict[str, list[ChunkRun]]:
    """For each key, its chunks in runs that share a home."""
    ending = PACKED if storage.compress else SAFETENSORS
    changed, still = f"rank-{rank:05d}{ending}", f"rank-{rank:05d}-still{ending}"
    runs: dict[str, list[ChunkRun]] = {}
    for key, tensor in tensors.items():
        num_chunks = math.ceil(tensor.nbytes / storage.chunk_bytes)
        linked = matches.linked.get(key, [None] * num_chunks)
        flags = matches.apart.get(key, [False] * num_chunks)
        homes = [extent or (still if flag else changed) for extent, flag in zip(linked, flags, strict=True)]
        runs[key] = list(_join(homes))
    return runs


def _join(homes: list[str | Extent]) -> Iterator[ChunkRun]:
    """Neighbours of one home as one run; so are linked chunks that are neighbours in their file, too."""
    first = 0
    for file, group in groupby(homes, lambda home: home if isinstance(home, str) else None):
        members = list(group)
        if file is not None:
            yield ChunkRun(first, len(members), file)
        else:
            yield from _join_extents(first, [home for home in members if isinstance(home, Extent)])
        first += len(members)


def _join_extents(first: int, extents: list[Extent]) -> Iterator[ChunkRun]:
    start, joined = 0, extents[0]
    for index, extent in enumerate(extents[1:], 1):
        follows = extent.file == joined.file and extent.offset == joined.offset + joined.stored_bytes
        if follows and extent.codec == joined.codec == PLAIN:
            size = joined.num_bytes + extent.num_bytes
            joined = replace(joined, num_bytes=size, stored_bytes=size)
        else:
            yield ChunkRun(first + start, index - start, joined)
            start, joined = index, extent
    yield ChunkRun(first + start, len(extents) - start, joined)
