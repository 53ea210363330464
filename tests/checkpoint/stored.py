"""Checkpoints of made-up tensors, written through the writer's own functions, without ranks or training."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from megalite.architecture.weights import Rectangle
from megalite.checkpoint.differential import Storage
from megalite.checkpoint.format import (
    CONFIG,
    Manifest,
    Piece,
    Progress,
    folder_name,
    hash_file,
    write_manifest,
)
from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.shares import FULL, WrittenShare, file_name, take_shares, write_share

SMALL = Storage(differential=True, chunk_bytes=256)
"""Chunks small enough for tiny tensors to have many."""

CONFIG_TEXT = "model: {hidden_size: 8}\n"


def store(
    root: Path,
    step: int,
    tensors: dict[str, Tensor],
    *,
    base: Path | None = None,
    storage: Storage = FULL,
    ranks: int = 1,
    dim: int = 0,
    layout: dict[str, int] | None = None,
) -> tuple[Path, list[WrittenShare]]:
    """Save whole tensors as `ranks` ranks that each hold a run of dim `dim` would; the folder, and what ranks wrote."""
    folder = root / folder_name(step)
    folder.mkdir(parents=True)
    written = []
    for rank in range(ranks):
        parts: dict[str, Tensor] = {}
        pieces: dict[str, list[Piece]] = {}
        for name, whole in tensors.items():
            cut = min(dim, whole.dim() - 1)
            first, last = (whole.shape[cut] * part // ranks for part in (rank, rank + 1))
            start = tuple(first if axis == cut else 0 for axis in range(whole.dim()))
            part = whole.narrow(cut, first, last - first).contiguous()
            key = f"{name}@{','.join(map(str, start))}"
            parts[key] = part
            pieces[name] = [Piece(file_name(rank), key, start, tuple(part.shape))]
        written.append(write_share(folder, rank, parts, pieces, base=base, storage=storage))
    files, records = take_shares(folder)
    (folder / CONFIG).write_text(CONFIG_TEXT, encoding="utf-8")
    files[CONFIG] = hash_file(folder / CONFIG)
    progress = Progress(step=step, num_updates=step, num_samples=4 * step, num_tokens=64 * step)
    write_manifest(folder, Manifest(progress, {"hidden_size": 8}, layout or {"tp": ranks}, records, files))
    return folder, written


def whole(reader: CheckpointReader, name: str) -> Tensor:
    """A whole tensor of a checkpoint."""
    shape = reader.manifest.tensors[name].shape
    return reader.read(name, Rectangle((0,) * len(shape), shape))


def assert_holds(folder: Path, tensors: dict[str, Tensor]) -> None:
    """A checkpoint is sound and holds exactly these tensors, bit for bit."""
    reader = CheckpointReader(folder)
    assert reader.verify() == []
    assert reader.manifest.tensors.keys() == tensors.keys()
    for name, want in tensors.items():
        assert torch.equal(whole(reader, name).view(torch.int32), want.view(torch.int32)), name
