"""The checkpoint on disk: rectangles of canonical weights in safetensors files, and a manifest that says where.

    step-0000123/
        manifest.json          which rectangle of which tensor lies in which file; checksums; progress; layout
        config.yaml            the run's resolved config
        rank-00000.safetensors one file for each rank that had something to write

A tensor is named `weight/NAME`, `exp_avg/NAME` or `exp_avg_sq/NAME` after its canonical weight: unfused, without
padding, fp32. Nothing says how the run was cut except the rectangles themselves, so any layout reads what any layout
wrote, and a reader needs neither torch.distributed nor DeepSpeed. Nothing is pickled: reading cannot run code.

The folder is written under another name and renamed when whole; a `step-` folder without manifest does not exist.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from megalite.errors import CheckpointError

FORMAT = "megalite-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
CONFIG = "config.yaml"
KINDS = ("weight", "exp_avg", "exp_avg_sq")
BYTES_PER_PARAMETER = 12
"""fp32 weight and two moments."""

HASH_CHUNK_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Piece:
    """A rectangle of a tensor, stored under `key` in `file`."""

    file: str
    key: str
    start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass
class TensorRecord:
    """A whole tensor and the pieces that tile it."""

    shape: tuple[int, ...]
    pieces: list[Piece] = field(default_factory=list)


@dataclass(frozen=True)
class FileRecord:
    """Size and xxh3_128 of a file, to tell a damaged one."""

    bytes: int
    xxh3_128: str


@dataclass(frozen=True)
class Progress:
    """How far a run has come: all there is to resume besides the tensors, since randomness here has no state."""

    step: int = 0
    """Steps done, skipped ones included."""
    num_updates: int = 0
    """Steps that changed the weights; the optimizer's own counter."""
    num_samples: int = 0
    """Sequences consumed; the next global sample index."""
    num_tokens: int = 0
    """Tokens consumed, padding included."""
    data_chain: str = ""
    """Running hash over the identity of every sample consumed (`data.audit`)."""


@dataclass
class Manifest:
    """All that a checkpoint says of itself."""

    progress: Progress
    model: dict[str, Any]
    """The filled model section of the config."""
    layout: dict[str, int]
    """The mesh and ZeRO stage that wrote it; for people, reading does not depend on it."""
    tensors: dict[str, TensorRecord]
    files: dict[str, FileRecord]
    megalite: str = ""
    """Version of the writer."""
    data: dict[str, Any] = field(default_factory=dict)
    """Fingerprint of the training data and path of its tokenizer."""


def tensor_name(kind: str, weight_name: str) -> str:
    """Name of a tensor in a checkpoint: `exp_avg/blocks.0.mlp.up.weight`."""
    return f"{kind}/{weight_name}"


def folder_name(step: int) -> str:
    """Folder of a step's checkpoint: `step-0000123`."""
    return f"step-{step:07d}"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write and sync `manifest.json`."""
    text = json.dumps({"format": FORMAT, "version": VERSION, **asdict(manifest)}, indent=1)
    with open(folder / MANIFEST, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> Manifest:
    """Read `manifest.json`.

    Raises:
        CheckpointError: there is none, it is not ours, or of a newer version.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{folder}: no {MANIFEST}, so this is not a complete checkpoint; give a step-… folder")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw["format"] != FORMAT:
            raise CheckpointError(f"{path}: format {raw['format']!r}, expected {FORMAT!r}")
        if raw["version"] > VERSION:
            raise CheckpointError(
                f"{path}: written by format version {raw['version']}, this megalite reads up to {VERSION}; upgrade it"
            )
        tensors = {name: _tensor_record(record) for name, record in raw["tensors"].items()}
        files = {name: FileRecord(**record) for name, record in raw["files"].items()}
        return Manifest(
            progress=Progress(**raw["progress"]),
            model=raw["model"],
            layout=raw["layout"],
            tensors=tensors,
            files=files,
            megalite=raw["megalite"],
            data=raw["data"],
        )
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: damaged ({error!r}); use an older checkpoint of the run") from error


def _tensor_record(raw: dict[str, Any]) -> TensorRecord:
    pieces = [Piece(p["file"], p["key"], tuple(p["start"]), tuple(p["shape"])) for p in raw["pieces"]]
    return TensorRecord(tuple(raw["shape"]), pieces)


def hash_file(path: Path) -> FileRecord:
    """Size and checksum of a file."""
    digest, size = xxhash.xxh3_128(), 0
    with open(path, "rb") as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return FileRecord(size, digest.hexdigest())
