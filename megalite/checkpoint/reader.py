"""Reading rectangles of a checkpoint: any rectangle of any tensor, whoever wrote it."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megalite.checkpoint.format import FileRecord, Manifest, Piece, hash_file, read_manifest, tensor_name
from megalite.errors import CheckpointError
from megalite.model.weights import Rectangle, Weight


class CheckpointReader:
    """An open checkpoint. Files are memory-mapped: only what is asked for is read."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.manifest: Manifest = read_manifest(folder)
        self._open: dict[str, safe_open] = {}

    def source(self, kind: str) -> CheckpointSource:
        """The weights (`weight`) or moments (`exp_avg`, `exp_avg_sq`) as a weight source."""
        return CheckpointSource(self, kind)

    def read(self, name: str, rectangle: Rectangle) -> Tensor:
        """A rectangle of a tensor, fp32 on the CPU, put together from the pieces that it overlaps.

        Raises:
            CheckpointError: there is no such tensor, or the pieces do not cover the rectangle.
        """
        record = self.manifest.tensors.get(name)
        if record is None:
            only_weights = not any(key.startswith("exp_avg/") for key in self.manifest.tensors)
            if only_weights and not name.startswith("weight/"):
                raise CheckpointError(f"{self.folder}: has weights only; use it with train.init_from in a new run.dir")
            raise CheckpointError(f"{self.folder}: has no {name}; it is of another model")
        out, num_filled = torch.empty(rectangle.shape), 0
        for piece in record.pieces:
            overlap = _overlap(piece, rectangle)
            if overlap is None:
                continue
            in_piece, in_out = overlap
            part = self._file(piece.file).get_slice(piece.key)[in_piece]
            out[in_out] = part
            num_filled += part.numel()
        if num_filled != out.numel():
            raise CheckpointError(
                f"{self.folder}: {name} has {num_filled} of the {out.numel()} numbers asked for at {rectangle}"
            )
        return out

    def verify(self, first: int = 0, stride: int = 1) -> list[str]:
        """Check sizes and checksums of every `stride`-th file and return what is wrong, one sentence a file."""
        problems = []
        for name, expected in sorted(self.manifest.files.items())[first::stride]:
            problem = _damage(self.folder / name, expected)
            if problem:
                problems.append(problem)
        return problems

    def _file(self, name: str) -> safe_open:
        if name not in self._open:
            try:
                self._open[name] = safe_open(self.folder / name, framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{self.folder / name}: cannot be read ({error})") from error
        return self._open[name]


class CheckpointSource:
    """One kind of a checkpoint's tensors as a `WeightSource`."""

    def __init__(self, reader: CheckpointReader, kind: str):
        self._reader = reader
        self._kind = kind

    def read(self, weight: Weight, rectangle: Rectangle) -> Tensor:
        name = tensor_name(self._kind, weight.name)
        record = self._reader.manifest.tensors.get(name)
        if record is not None and record.shape != weight.shape:
            raise CheckpointError(
                f"{self._reader.folder}: {weight.name} is {list(record.shape)} there and {list(weight.shape)} in the "
                f"config; it is of another model"
            )
        return self._reader.read(name, rectangle)


def _damage(path: Path, expected: FileRecord) -> str | None:
    if not path.is_file():
        return f"{path}: missing"
    size = path.stat().st_size
    if size != expected.bytes:
        return f"{path}: {size} bytes, expected {expected.bytes}"
    if hash_file(path) != expected:
        return f"{path}: its checksum differs from the manifest's"
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
