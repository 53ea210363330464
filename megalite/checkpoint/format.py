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
checks. Older ones are read as before. What a manifest may hold is a closed world: the dataclasses below are all of it,
and pieces must lie within their tensors.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash
from pydantic import ConfigDict, TypeAdapter, ValidationError

from megalite.architecture.architecture import Architecture
from megalite.config.fill import FILLED, FilledModel
from megalite.data.cursor import DataCursor
from megalite.errors import CheckpointError, MisnamedError
from megalite.records import explain

FORMAT = "megalite-checkpoint"
VERSION = 4
MANIFEST = "manifest.json"
CONFIG = "config.yaml"
BYTES_PER_PARAMETER = 12
"""fp32 weight and two moments; most optimizers keep less."""

BYTES_PER_NUMBER = 4
"""In a piece: fp32, whatever the run kept."""

HASH_BLOCK_BYTES = 4 * 2**20

LARGEST_TENSOR = 2**53
"""Numbers in one; more than any disk holds, and few enough to count with."""

CLOSED = ConfigDict(strict=True, extra="forbid")
"""No other keys, no other types."""

_NO_CHECKSUM = "0" * 32
_CHECKSUM = re.compile(r'"checksum": "([0-9a-f]{32})"')


@dataclass(frozen=True)
class Extent:
    """Consecutive bytes of a piece, and where in a file they lie."""

    __pydantic_config__ = CLOSED

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

    __pydantic_config__ = CLOSED

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

    __pydantic_config__ = CLOSED

    shape: tuple[int, ...]
    pieces: list[Piece] = field(default_factory=list)


@dataclass(frozen=True)
class FileRecord:
    """Size and xxh3_128 of a file, to tell a damaged one."""

    __pydantic_config__ = CLOSED

    bytes: int
    xxh3_128: str
    age: int = field(default=0, compare=False)
    """How many saves have carried it on, as a hard link, since it was written."""


@dataclass(frozen=True)
class Progress:
    """How far a run has come: all there is to resume besides the tensors, since randomness here has no state."""

    __pydantic_config__ = CLOSED

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
    consumed: dict[str, int] = field(default_factory=dict)
    """Samples consumed, by source."""
    account: DataCursor = field(default_factory=DataCursor)
    """What was left out of the data, and what was drawn under earlier mixtures."""
    components: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What each part of the training loop must remember, by its name; those with nothing to remember are left out."""


@dataclass
class Manifest:
    """All that a checkpoint says of itself."""

    __pydantic_config__ = CLOSED

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


@dataclass
class _Stored(Manifest):
    """A manifest as its file has it."""

    format: str = FORMAT
    version: int = VERSION
    checksum: str | None = None


@dataclass
class _Share:
    """A rank's note of what it wrote."""

    __pydantic_config__ = CLOSED

    files: dict[str, FileRecord]
    pieces: dict[str, list[Piece]]


_STORED = TypeAdapter(_Stored)
_SHARE = TypeAdapter(_Share)


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


def step_of_folder(folder: Path) -> int | None:
    """The step in a folder's own name or, for a link such as `best`, in the name of what it leads to."""
    step = step_of_name(folder.name)
    return step_of_name(folder.resolve().name) if step is None else step


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


def _why_no_manifest(folder: Path) -> str:
    if folder.is_symlink() and not folder.exists():
        target = os.readlink(folder)
        return f"a link to {target}, which is not there; bring that back (is its disk mounted?), or remove the link"
    if folder.exists() and not folder.is_dir():
        return "no folder, so no checkpoint; rename or remove it"
    return f"no {MANIFEST}, so this is not a complete checkpoint; give a step-… folder"


def read_manifest(folder: Path) -> Manifest:
    """Read `manifest.json`.

    Raises:
        CheckpointError: there is none, it is not ours, of a newer version, or damaged.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{folder}: {_why_no_manifest(folder)}")
    try:
        text = path.read_bytes().decode("utf-8")
        head = json.loads(text)
        _check_head(path, head, text)
        stored = _STORED.validate_json(text if head["version"] > 3 else json.dumps(_with_components(head)))
    except ValidationError as error:
        raise CheckpointError(f"{path}: damaged: {explain(error)}; use an older checkpoint of the run") from error
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged ({error!r}); use an older checkpoint of the run") from error
    _check_names(path, stored)
    _check_step(folder, stored)
    problem = next(_impossible(stored), None)
    if problem is not None:
        raise CheckpointError(f"{path}: damaged ({problem}); use an older checkpoint of the run")
    return Manifest(**{name: getattr(stored, name) for name in Manifest.__dataclass_fields__})


def _with_components(stored: dict[str, Any]) -> dict[str, Any]:
    """The manifest of a version up to 3, which had the state of the loop's parts in three fields of progress."""
    progress = dict(stored["progress"])
    health = progress.pop("health", {})
    components = {
        "adaptive_control": progress.pop("steering", {}),
        "validation": progress.pop("evaluation", {}),
        "spikes": health.pop("spikes", {}),
        "rollback_limit": health,
    }
    progress["components"] = {name: state for name, state in components.items() if state}
    return {**stored, "progress": progress}


def stored_model(folder: Path, manifest: Manifest) -> Architecture:
    """The filled model of a checkpoint.

    Raises:
        CheckpointError: its manifest describes none that this megalite knows.
    """
    try:
        model = FilledModel.model_validate(manifest.model)
    except ValidationError as error:
        raise CheckpointError(f"{folder}: its model is none that is known here: {explain(error)}") from error
    missing = [name for name in FILLED if getattr(model, name) is None]
    if model.moe is not None and model.moe.ffn_hidden_size is None:
        missing.append("moe.ffn_hidden_size")
    if missing:
        raise CheckpointError(f"{folder}: its model has no {', '.join(missing)}; use an older checkpoint of the run")
    return Architecture(**{name: getattr(model, name) for name in Architecture.model_fields})


def read_share(text: str) -> tuple[dict[str, FileRecord], dict[str, list[Piece]]]:
    """What a rank's note says of its share: files, and pieces by tensor."""
    share = _SHARE.validate_json(text)
    return share.files, share.pieces


def _impossible(manifest: Manifest) -> Iterator[str]:
    """What no writer could have meant, though every value is of its type."""
    for name, record in manifest.tensors.items():
        if not record.shape or min(record.shape) < 1 or math.prod(record.shape) > LARGEST_TENSOR:
            yield f"{name} has the shape {list(record.shape)}"
        for piece in record.pieces:
            yield from (f"a piece of {name} {fault}" for fault in _piece_faults(piece, record.shape, manifest.files))
        if sum(math.prod(piece.shape) for piece in record.pieces) != math.prod(record.shape):
            yield f"the pieces of {name} do not tile it"
    for name, file in manifest.files.items():
        if file.bytes < 0 or file.age < 0:
            yield f"{name} has {file.bytes} bytes"
    progress = manifest.progress
    if min(progress.step, progress.num_updates, progress.num_samples, progress.num_tokens) < 0:
        yield "its progress is negative"


def _piece_faults(piece: Piece, whole: tuple[int, ...], files: dict[str, FileRecord]) -> Iterator[str]:
    """What is wrong with a piece of a tensor of the shape `whole`."""
    if not len(piece.start) == len(piece.shape) == len(whole) or any(
        start < 0 or size < 1 or start + size > length
        for start, size, length in zip(piece.start, piece.shape, whole, strict=True)
    ):
        yield f"at {list(piece.start)} does not lie within it"
    if bool(piece.file) != bool(piece.key) or bool(piece.file) == bool(piece.extents):
        yield "is neither whole in a file nor in extents"
    if piece.chunk_bytes < 0 or (piece.chunks and not piece.chunk_bytes):
        yield f"has chunks of {piece.chunk_bytes} bytes"
    num_bytes = BYTES_PER_NUMBER * math.prod(piece.shape)
    if piece.file and num_bytes > files[piece.file].bytes:
        yield f"has {num_bytes} bytes, more than {piece.file}"
    if piece.extents and sum(part.num_bytes for part in piece.extents) != num_bytes:
        yield f"has {num_bytes} bytes, its extents another number"
    for part in piece.extents:
        if min(part.offset, part.num_bytes, part.stored_bytes) < 0 or (
            part.offset + part.stored_bytes > files[part.file].bytes
        ):
            yield f"has an extent that does not lie within {part.file}"


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
    named, held = step_of_folder(folder), manifest.progress.step
    if named is not None and named != held:
        raise MisnamedError(
            f"{folder}: holds step {held}, though its name says {named}; give it its name back: {folder_name(held)}"
        )


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
