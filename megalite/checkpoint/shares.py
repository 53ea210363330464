"""What each rank leaves in a checkpoint that is being written: its files of tensors, and a note of what lies in them.

    rank-00000.safetensors         this rank's rectangles: all of them, or those that changed since a base
    rank-00000-still.safetensors   differential only: unchanged, but in no file of the base that is worth linking
    from-…                         differential only: links to files of the base
    share-00000.json               their checksums and the pieces; rank 0 merges these notes into the manifest

A rank with nothing to write leaves none. Compressed files end in .zst: packed chunks, one after the other.

Files are hashed while they are written, so the bytes pass through memory once, and no second copy of the tensors is
made.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torch import Tensor

from megalite.checkpoint.chunk_files import ChunkFiles
from megalite.checkpoint.codec import hash_chunks
from megalite.checkpoint.differential import Matches, Storage, match
from megalite.checkpoint.format import FileRecord, Piece, TensorRecord, read_share
from megalite.checkpoint.tensor_file import as_bytes

FULL = Storage()
"""Everything, in plain safetensors files."""


@dataclass(frozen=True)
class WrittenShare:
    """What a rank's share took."""

    bytes_written: int = 0
    bytes_linked: int = 0
    """Bytes of tensors that lie in linked files."""
    note: str = ""
    """For people: why a differential save linked nothing, or less than it could."""


def file_name(rank: int) -> str:
    """Name of the file of a rank's tensors."""
    return f"rank-{rank:05d}.safetensors"


def write_share(
    folder: Path,
    rank: int,
    tensors: dict[str, Tensor],
    pieces: dict[str, list[Piece]],
    *,
    base: Path | None = None,
    storage: Storage = FULL,
) -> WrittenShare:
    """Write a rank's tensors and the note of their pieces; both are on the disk afterwards.

    Args:
        folder: of the checkpoint that is being written.
        tensors: fp32, contiguous, on the CPU, by key.
        pieces: where they belong, by tensor name.
        base: an older checkpoint to save against; see `differential.find_base`.

    Raises:
        OSError: they could not be written.
    """
    if not tensors:
        return WrittenShare()
    matches = Matches({}, {}, {})
    if storage.differential:
        pieces = {name: [_hashed(piece, tensors, storage) for piece in parts] for name, parts in pieces.items()}
        matches = match(folder, pieces, base, storage)
    chunk_files = ChunkFiles(rank, tensors, matches, storage)
    written = chunk_files.write(folder)
    placed = {name: [chunk_files.place(piece) for piece in parts] for name, parts in pieces.items()}
    _leave_note(folder, rank, {**matches.files, **written}, placed)
    linked = sum(extent.num_bytes for extents in matches.linked.values() for extent in extents if extent)
    return WrittenShare(sum(record.bytes for record in written.values()), linked, matches.note)


def take_shares(folder: Path) -> tuple[dict[str, FileRecord], dict[str, TensorRecord]]:
    """Merge and remove the notes of all ranks: the files, and the tensors that they hold, each whole."""
    files: dict[str, FileRecord] = {}
    tensors: dict[str, TensorRecord] = {}
    for path in sorted(folder.glob("share-*.json")):
        own_files, own_pieces = read_share(path.read_text(encoding="utf-8"))
        files |= own_files
        for name, parts in own_pieces.items():
            tensors.setdefault(name, TensorRecord(())).pieces += parts
        path.unlink()
    for name, record in tensors.items():
        record.shape = _tiled_shape(name, record.pieces)
    return files, tensors


def sync(path: Path) -> None:
    """Make a file or folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hashed(piece: Piece, tensors: dict[str, Tensor], storage: Storage) -> Piece:
    chunks = hash_chunks(as_bytes(tensors[piece.key]), storage.chunk_bytes)
    return replace(piece, chunk_bytes=storage.chunk_bytes, chunks=chunks)


def _leave_note(folder: Path, rank: int, files: dict[str, FileRecord], pieces: dict[str, list[Piece]]) -> None:
    share = {
        "files": {name: asdict(record) for name, record in files.items()},
        "pieces": {name: [asdict(piece) for piece in parts] for name, parts in pieces.items()},
    }
    (folder / f"share-{rank:05d}.json").write_text(json.dumps(share), encoding="utf-8")


def _tiled_shape(name: str, pieces: list[Piece]) -> tuple[int, ...]:
    """Shape of the tensor that the pieces tile."""
    corners = [[start + size for start, size in zip(p.start, p.shape, strict=True)] for p in pieces]
    shape = tuple(max(ends) for ends in zip(*corners, strict=True))
    assert sum(math.prod(p.shape) for p in pieces) == math.prod(shape), f"{name}: its pieces leave holes: {pieces}"
    return shape
