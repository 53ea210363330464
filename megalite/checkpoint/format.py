"""The checkpoint on disk: rectangles of canonical weights in safetensors files, and a manifest that says where.

    step-0000123/
        manifest.json          which rectangle of which tensor lies in which file; checksums; progress; layout
        config.yaml            the run's resolved config
        rank-00000.safetensors one file for each rank that had something to write
        from-…                 differential only: hard links to files of older checkpoints (`differential.py`)

A tensor is named `weight/NAME`, `exp_avg/NAME`, `exp_avg_sq/NAME` and so on (`optim.rules`) after its canonical weight:
unfused, without padding, fp32. Nothing says how the run was cut except the rectangles themselves, so any layout reads
what any layout wrote, and a reader needs neither torch.distributed nor DeepSpeed. Nothing is pickled: reading cannot
run code.

The folder is written under another name and renamed when whole; a `step-` folder without manifest does not exist.
Every file has its checksum in the manifest, and the manifest one of itself, so a flipped byte anywhere is found.

Version 2 added the manifest's own checksum, and extents; version 3 the account of the data and the state of the health
checks. Older ones are read as before.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from megalite.data.account import Account
from megalite.errors import CheckpointError

FORMAT = "megalite-checkpoint"
VERSION = 3
MANIFEST = "manifest.json"
CONFIG = "config.yaml"
BYTES_PER_PARAMETER = 12
"""fp32 weight and two moments; most optimizers keep less."""

HASH_BLOCK_BYTES = 4 * 2**20

_NO_CHECKSUM = "0" * 32
_CHECKSUM = re.compile(r'"checksum": "([0-9a-f]{32})"')


@dataclass(frozen=True)
class Extent:
    """Consecutive bytes of a piece, and where in a file they lie."""

    file: str
    offset: int
    """First byte in the file."""
    num_bytes: int
    """Bytes of the piece."""
    stored_bytes: int
    """Bytes in the file."""
    codec: str = ""
    """How the stored bytes were made of the piece's: empty for as they are, else a name that `codec.py` knows."""


@dataclass(frozen=True)
class Piece:
    """A rectangle of a tensor: stored whole under `key` in `file`, or, with both empty, as `extents` in order."""

    file: str
    key: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    extents: tuple[Extent, ...] = ()
    """fp32, row by row, little-endian."""
    chunk_bytes: int = 0
    """Size of what `chunks` hashes; the last chunk may be smaller."""
    chunks: tuple[str, ...] = ()
    """xxh3_128 of each chunk of its fp32 bytes, for a later differential save; empty when none was wanted."""

    @property
    def files(self) -> tuple[str, ...]:
        """Every file that holds some of it."""
        return (self.file,) if self.file else tuple(dict.fromkeys(extent.file for extent in self.extents))


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
    age: int = field(default=0, compare=False)
    """How many saves have carried it on, as a hard link, since it was written."""


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
    steering: dict[str, Any] = field(default_factory=dict)
    """State of what goes by measurements (`train.steering`); empty where everything is a function of the step."""
    consumed: dict[str, int] = field(default_factory=dict)
    """Samples consumed, by source."""
    account: Account = field(default_factory=Account)
    """What was left out of the data, and what was drawn under earlier mixtures."""
    health: dict[str, Any] = field(default_factory=dict)
    """State of the health checks (`train.spikes`)."""
    evaluation: dict[str, Any] = field(default_factory=dict)
    """The best so far and the wait for progress (`train.evaluation.standing`); empty before the first validation."""

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Progress:
        """As a manifest of any version has it."""
        account = {"account": Account.from_json(raw["account"])} if "account" in raw else {}
        return cls(**{**raw, **account})


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


def step_of_name(name: str) -> int | None:
    """The step in a folder's name, or None if it is not a checkpoint's."""
    match = re.fullmatch(r"step-(\d{7,})", name)
    return int(match[1]) if match else None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write and sync `manifest.json`, with a checksum of itself."""
    head = {"format": FORMAT, "version": VERSION, "checksum": _NO_CHECKSUM}
    content = asdict(manifest)
    for record in content["tensors"].values():
        record["pieces"] = [_without_defaults(piece) for piece in record["pieces"]]
    text = json.dumps({**head, **content}, indent=1)
    checksum = xxhash.xxh3_128_hexdigest(text.encode("utf-8"))
    with open(folder / MANIFEST, "w", encoding="utf-8") as file:
        file.write(text.replace(_NO_CHECKSUM, checksum, 1))
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> Manifest:
    """Read `manifest.json`.

    Raises:
        CheckpointError: there is none, it is not ours, of a newer version, or damaged.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{folder}: no {MANIFEST}, so this is not a complete checkpoint; give a step-… folder")
    try:
        text = path.read_bytes().decode("utf-8")
        raw = json.loads(text)
        _check_head(path, raw, text)
        manifest = Manifest(
            progress=Progress.from_json(raw["progress"]),
            model=raw["model"],
            layout=raw["layout"],
            tensors={name: _tensor_record(record) for name, record in raw["tensors"].items()},
            files={name: FileRecord(**record) for name, record in raw["files"].items()},
            megalite=raw["megalite"],
            data=raw["data"],
        )
        _check_names(path, manifest)
        _check_step(folder, manifest)
        return manifest
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # JSON and UTF-8 errors are ValueErrors
        raise CheckpointError(f"{path}: damaged ({error!r}); use an older checkpoint of the run") from error


def piece_from_json(raw: dict[str, Any]) -> Piece:
    """A piece from its JSON form."""
    extents = tuple(Extent(**extent) for extent in raw.get("extents", ()))
    return Piece(
        raw["file"],
        raw["key"],
        tuple(raw["start"]),
        tuple(raw["shape"]),
        extents,
        raw.get("chunk_bytes", 0),
        tuple(raw.get("chunks", ())),
    )


def _check_head(path: Path, raw: dict[str, Any], text: str) -> None:
    """Refuse what is not ours, too new, or not what was written."""
    if raw["format"] != FORMAT:
        raise CheckpointError(f"{path}: format {raw['format']!r}, expected {FORMAT!r}")
    if raw["version"] > VERSION:
        raise CheckpointError(
            f"{path}: written by format version {raw['version']}, this megalite reads up to {VERSION}; upgrade it"
        )
    found = _CHECKSUM.search(text)
    if found is None and raw["version"] == 1:
        return
    start, stop = found.span(1) if found else (0, 0)
    checksum = xxhash.xxh3_128_hexdigest((text[:start] + _NO_CHECKSUM + text[stop:]).encode("utf-8"))
    if found is None or checksum != found[1]:
        raise CheckpointError(
            f"{path}: damaged (it does not match its own checksum; if it was edited by hand, take the edit back); "
            f"use an older checkpoint of the run"
        )


def _check_names(path: Path, manifest: Manifest) -> None:
    """Refuse files outside the folder, and pieces in files that nothing is known of."""
    for name in manifest.files:
        if name != os.path.basename(name) or name in ("", ".", ".."):
            raise CheckpointError(f"{path}: damaged (a file is called {name!r}, expected a name without a folder)")
    for name, record in manifest.tensors.items():
        unknown = {file for piece in record.pieces for file in piece.files} - manifest.files.keys()
        if unknown:
            raise CheckpointError(f"{path}: damaged ({name} lies in {min(unknown)!r}, which has no checksum)")


def _check_step(folder: Path, manifest: Manifest) -> None:
    """Refuse a folder that was given another step's name."""
    named, held = step_of_name(folder.resolve().name), manifest.progress.step
    if named is not None and named != held:
        raise CheckpointError(
            f"{folder}: holds step {held}, though its name says {named}; give it its name back: {folder_name(held)}"
        )


def _tensor_record(raw: dict[str, Any]) -> TensorRecord:
    return TensorRecord(tuple(raw["shape"]), [piece_from_json(piece) for piece in raw["pieces"]])


def _without_defaults(piece: dict[str, Any]) -> dict[str, Any]:
    """A piece's JSON form without what a plain piece does not have: manifests of large models stay readable."""
    return {key: value for key, value in piece.items() if value or key in ("file", "key", "start", "shape")}


def hash_file(path: Path) -> FileRecord:
    """Size and checksum of a file."""
    digest, size = xxhash.xxh3_128(), 0
    block = memoryview(bytearray(HASH_BLOCK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
            size += count
    return FileRecord(size, digest.hexdigest())
