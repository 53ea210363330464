"""Reading rectangles of a checkpoint: any rectangle of any tensor, whoever wrote it.

A plain piece is read through safetensors. A piece in extents is put together slab by slab, a slab being some rows: one
that lies in a single extent is a view of the memory-mapped file, others are copied, so no more than a slab is in memory
beside the result. Nothing is unpickled, whatever lies in the folder.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megalite.architecture.weights import Rectangle, Weight, is_of_model
from megalite.checkpoint.codec import PLAIN, unpack
from megalite.checkpoint.format import Extent, FileRecord, Manifest, Piece, hash_file, read_manifest, tensor_name
from megalite.errors import CheckpointError

SLAB_BYTES = 16 * 2**20
"""Of rows that are put together at once."""

Overlap = tuple[Piece, tuple[slice, ...], tuple[slice, ...]]
"""A piece, and the slices into it and into what is asked for that mark what both have in common."""


class CheckpointReader:
    """An open checkpoint. Files are memory-mapped: only what is asked for is read."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.manifest: Manifest = read_manifest(folder)
        self._open: dict[str, safe_open] = {}
        self._mapped: dict[str, np.ndarray] = {}
        self._unpacked: tuple[Extent, np.ndarray] | None = None
        self._joined = np.empty(0, np.uint8)

    def source(self, kind: str) -> CheckpointSource:
        """The weights (`weight`) or one kind of optimizer state (`exp_avg`, ...) as a weight source."""
        return CheckpointSource(self, kind)

    def kinds(self) -> tuple[str, ...]:
        """`weight`, and the kinds of optimizer state that it has."""
        return tuple(dict.fromkeys(name.split("/", 1)[0] for name in self.manifest.tensors))

    def read(self, name: str, rectangle: Rectangle) -> Tensor:
        """A rectangle of a tensor, fp32 on the CPU, put together from the pieces that it overlaps.

        Raises:
            CheckpointError: there is no such tensor, a file is damaged, or the pieces do not cover the rectangle.
        """
        out = torch.empty(rectangle.shape)
        self._put_together(name, rectangle, self._overlaps(name, rectangle), out)
        return out

    def view(self, name: str, rectangle: Rectangle) -> Tensor:
        """The same without a copy where it lies in a single piece: then it is the memory-mapped file itself, not to be
        written to.

        Raises:
            CheckpointError: as `read`.
        """
        overlaps = self._overlaps(name, rectangle)
        if len(overlaps) == 1 and not overlaps[0][0].extents:
            part = self._read_plain(overlaps[0][0], overlaps[0][1])
            if part.dtype == torch.float32 and part.shape == rectangle.shape:
                return part
        out = torch.empty(rectangle.shape)
        self._put_together(name, rectangle, overlaps, out)
        return out

    def _overlaps(self, name: str, rectangle: Rectangle) -> list[Overlap]:
        """The pieces that a rectangle overlaps, each with the slices into the piece and into the rectangle."""
        record = self.manifest.tensors.get(name)
        if record is None:
            kinds = self.kinds()
            if all(map(is_of_model, self.manifest.tensors)) and not is_of_model(name):
                raise CheckpointError(f"{self.folder}: has weights only; use it with train.init_from in a new run.dir")
            if name.split("/", 1)[0] not in kinds:
                raise CheckpointError(
                    f"{self.folder}: has no {name}, but {', '.join(kinds)}: it is of another optimizer; put "
                    f"optimizer.name back, or start a new run from these weights: run.dir=NEW "
                    f"train.init_from={self.folder}"
                )
            raise CheckpointError(f"{self.folder}: has no {name}; it is of another model")
        found = ((piece, _overlap(piece, rectangle)) for piece in record.pieces)
        return [(piece, *slices) for piece, slices in found if slices is not None]

    def _put_together(self, name: str, rectangle: Rectangle, overlaps: list[Overlap], out: Tensor) -> None:
        num_filled = 0
        for piece, in_piece, in_out in overlaps:
            if piece.extents:
                num_filled += self._read_extents(piece, in_piece, out[in_out].numpy())
                continue
            part = self._read_plain(piece, in_piece)
            if part.dtype == torch.float32:
                np.copyto(out[in_out].numpy(), part.numpy())  # torch's own copy would start threads
            else:
                out[in_out] = part
            num_filled += part.numel()
        if num_filled != out.numel():
            raise CheckpointError(
                f"{self.folder}: {name} has {num_filled} of the {out.numel()} numbers asked for at {rectangle}"
            )

    def slabs(self, name: str, max_bytes: int = SLAB_BYTES) -> Iterator[Tensor]:
        """A whole tensor in runs of rows of at most `max_bytes`, or of one row, in order.

        All are in the same memory, so each is lost when the next is asked for: new memory for each would leave the heap
        full of holes, as large together as several slabs.
        """
        shape = self.manifest.tensors[name].shape
        num_rows = max(1, max_bytes // (4 * math.prod(shape[1:])))
        slab = torch.empty(min(num_rows, shape[0]), *shape[1:])
        for first in range(0, shape[0], num_rows):
            rows = Rectangle((first, *(0 for _ in shape[1:])), (min(num_rows, shape[0] - first), *shape[1:]))
            self._put_together(name, rows, self._overlaps(name, rows), slab[: rows.shape[0]])
            yield slab[: rows.shape[0]]

    def verify(self, first: int = 0, stride: int = 1) -> list[str]:
        """Check sizes and checksums of every `stride`-th file and return what is wrong, one sentence a file."""
        problems = []
        for name, expected in sorted(self.manifest.files.items())[first::stride]:
            problem = damage(self.folder / name, expected)
            if problem:
                problems.append(problem)
        return problems

    def _read_plain(self, piece: Piece, slices: tuple[slice, ...]) -> Tensor:
        """Part of a piece, as a view of the mapped file."""
        path = self.folder / piece.file
        try:
            if piece.file not in self._open:
                self._open[piece.file] = safe_open(path, framework="pt")
            stored = self._open[piece.file].get_slice(piece.key)
            if tuple(stored.get_shape()) != piece.shape:
                raise CheckpointError(f"{path}: {piece.key} has shape {stored.get_shape()}, expected {piece.shape}")
            return stored[slices]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error})") from error

    def _read_extents(self, piece: Piece, slices: tuple[slice, ...], out: np.ndarray) -> int:
        """Fill `out` with part of a piece, slab by slab; returns how many numbers that were."""
        rows, columns = slices[0], (slice(None), *slices[1:])
        row_bytes = 4 * math.prod(piece.shape[1:])
        step = max(1, SLAB_BYTES // row_bytes)
        num_filled = 0
        for first in range(rows.start, rows.stop, step):
            last = min(first + step, rows.stop)
            slab = self._bytes(piece, first * row_bytes, last * row_bytes).view("<f4")
            part = slab.reshape(last - first, *piece.shape[1:])[columns]
            out[first - rows.start : last - rows.start] = part
            num_filled += part.size
        return num_filled

    def _bytes(self, piece: Piece, start: int, stop: int) -> np.ndarray:
        """Bytes `start` to `stop` of a piece: a view if they lie in one extent, else a copy, lost at the next call."""
        if len(self._joined) < stop - start:
            self._joined = np.empty(stop - start, np.uint8)
        joined, position = self._joined[: stop - start], 0
        for extent in piece.extents:
            first, last = max(start, position), min(stop, position + extent.num_bytes)
            if first < last:
                part = self._extent(extent)[first - position : last - position]
                if last - first == stop - start:
                    return part
                joined[first - start : last - start] = part
            position += extent.num_bytes
        if position < stop:
            raise CheckpointError(f"{self.folder}: the piece at {piece.start} has {position} bytes, expected {stop}")
        return joined

    def _extent(self, extent: Extent) -> np.ndarray:
        """The bytes of an extent; the last one unpacked is kept, since slabs and chunks do not end together."""
        stored = self._map(extent.file)[extent.offset : extent.offset + extent.stored_bytes]
        if len(stored) != extent.stored_bytes:
            raise CheckpointError(
                f"{self.folder / extent.file}: ends before byte {extent.offset + extent.stored_bytes}"
            )
        if extent.codec == PLAIN:
            return stored
        if self._unpacked is None or self._unpacked[0] != extent:
            self._unpacked = extent, unpack(stored, extent.num_bytes, extent.codec, self.folder / extent.file)
        return self._unpacked[1]

    def _map(self, name: str) -> np.ndarray:
        if name not in self._mapped:
            try:
                with open(self.folder / name, "rb") as file:
                    mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:  # ValueError: an empty file
                raise CheckpointError(f"{self.folder / name}: cannot be read ({error})") from error
            self._mapped[name] = np.frombuffer(mapping, np.uint8)
        return self._mapped[name]


class CheckpointSource:
    """One kind of a checkpoint's tensors as a `WeightSource`."""

    def __init__(self, reader: CheckpointReader, kind: str):
        self._reader = reader
        self._kind = kind

    def read(self, weight: Weight, rectangle: Rectangle) -> Tensor:
        name = tensor_name(self._kind, weight.name) if weight.state is None else weight.state
        record = self._reader.manifest.tensors.get(name)
        if weight.state is not None and record is None:
            return torch.zeros(rectangle.shape)  # of a model that had none, or had not begun to move it
        if record is not None and record.shape != weight.shape:
            raise CheckpointError(
                f"{self._reader.folder}: {weight.name} is {list(record.shape)} there and {list(weight.shape)} in the "
                f"config; it is of another model"
            )
        return self._reader.view(name, rectangle)


def damage(path: Path, expected: FileRecord, *, quick: bool = False) -> str | None:
    """What is wrong with a file, as a sentence, or None; `quick` looks at its size only."""
    try:
        if not path.is_file():
            return f"{path}: missing"
        if (size := path.stat().st_size) != expected.bytes:
            return f"{path}: {size} bytes, expected {expected.bytes}"
        if not quick and hash_file(path) != expected:
            return f"{path}: its checksum differs from the manifest's"
    except OSError as error:  # a bad block, or no permission
        return f"{path}: cannot be read ({error})"
    return None


def _overlap(piece: Piece, wanted: Rectangle) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Where a piece and a rectangle overlap, as slices into each; None where they do not."""
    in_piece, in_wanted = [], []
    for p_start, p_size, w_start, w_size in zip(piece.start, piece.shape, wanted.start, wanted.shape, strict=True):
        start, stop = max(p_start, w_start), min(p_start + p_size, w_start + w_size)
        if start >= stop:
            return None
        in_piece.append(slice(start - p_start, stop - p_start))
        in_wanted.append(slice(start - w_start, stop - w_start))
    return tuple(in_piece), tuple(in_wanted)
