"""What each rank leaves in a checkpoint that is being written: its file of tensors, and a note of what lies in it.

    rank-00000.safetensors   this rank's rectangles
    share-00000.json         its checksum and pieces; rank 0 merges these notes into the manifest

A rank with nothing to write leaves neither.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from megalite.checkpoint.format import FileRecord, Piece, TensorRecord, hash_file

READABLE = 0o644


def file_name(rank: int) -> str:
    """Name of the file of a rank's tensors."""
    return f"rank-{rank:05d}.safetensors"


def write_share(folder: Path, rank: int, tensors: dict[str, Tensor], pieces: dict[str, list[Piece]]) -> None:
    """Write a rank's tensors, by key, and the note of their pieces, by tensor name; both are on the disk afterwards."""
    if not tensors:
        return
    path = folder / file_name(rank)
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(READABLE)  # safetensors makes it the owner's alone; a converter may be someone else
    sync(path)
    share = {
        "file": path.name,
        "record": asdict(hash_file(path)),
        "pieces": {name: [asdict(piece) for piece in parts] for name, parts in pieces.items()},
    }
    (folder / f"share-{rank:05d}.json").write_text(json.dumps(share), encoding="utf-8")


def take_shares(folder: Path) -> tuple[dict[str, FileRecord], dict[str, TensorRecord]]:
    """Merge and remove the notes of all ranks: the files, and the tensors that they hold, each whole."""
    files: dict[str, FileRecord] = {}
    tensors: dict[str, TensorRecord] = {}
    for path in sorted(folder.glob("share-*.json")):
        share = json.loads(path.read_text(encoding="utf-8"))
        files[share["file"]] = FileRecord(**share["record"])
        for name, parts in share["pieces"].items():
            record = tensors.setdefault(name, TensorRecord(()))
            record.pieces += [Piece(p["file"], p["key"], tuple(p["start"]), tuple(p["shape"])) for p in parts]
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


def _tiled_shape(name: str, pieces: list[Piece]) -> tuple[int, ...]:
    """Shape of the tensor that the pieces tile."""
    corners = [[start + size for start, size in zip(p.start, p.shape, strict=True)] for p in pieces]
    shape = tuple(max(ends) for ends in zip(*corners, strict=True))
    assert sum(math.prod(p.shape) for p in pieces) == math.prod(shape), f"{name}: its pieces leave holes: {pieces}"
    return shape
