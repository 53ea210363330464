"""Merging: any checkpoint, written by many ranks or differentially, as one that is full and in few files.

    CKPT --checksums--> OUT's neighbour .merging-OUT-… : slab by slab --sync--> rename to OUT

The result is a checkpoint like any other, without hard links and packed chunks: to archive, to send elsewhere, or, as
weights only in bf16, to start or serve from at a sixth of the size. A slab of one tensor is in memory at a time.

OUT is there whole or not at all, whenever the process dies. A folder that a dead merge left beside it is removed by the
next one; the lock of a living merge protects its own.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megalite import __version__
from megalite.architecture.weights import is_of_model
from megalite.checkpoint.averaged_weights import model_slabs
from megalite.checkpoint.catalog import DISK_MARGIN, commit
from megalite.checkpoint.format import (
    MANIFEST,
    FileRecord,
    Piece,
    TensorRecord,
    folder_name,
    step_of_folder,
    write_manifest,
)
from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.shares import sync
from megalite.checkpoint.tensor_file import Entry, TensorFile, as_bytes, group_by_size
from megalite.errors import CheckpointError
from megalite.page.numbers import size

MERGING = ".merging-"
DEFAULT_FILE_BYTES = 5 * 10**9
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Merged:
    """What a merge made."""

    source: Path
    folder: Path
    num_tensors: int
    num_bytes: int
    """Of the tensors."""
    num_files: int
    """Of tensors."""


def merge(
    checkpoint: Path,
    out: Path,
    *,
    weights_only: bool = False,
    dtype: str = "fp32",
    max_file_bytes: int = DEFAULT_FILE_BYTES,
    overwrite: bool = False,
) -> Merged:
    """Write a checkpoint's tensors into one full, plain checkpoint.

    Args:
        checkpoint: its folder.
        out: folder to make.
        weights_only: leave out what training goes on from, as the optimizer's moments; such a checkpoint can be
            started from, but not resumed. Where the run averages its weights, it has the averages.
        dtype: fp32, or, for weights only, bf16; routers' biases stay in fp32.
        max_file_bytes: no file is larger, unless a single tensor is.
        overwrite: replace an older checkpoint at `out`.

    Raises:
        CheckpointError: the checkpoint is damaged, `out` is taken or cannot be written, the disk is too small, or bf16
            was asked for with moments.
    """
    if dtype != "fp32" and not weights_only:
        raise CheckpointError(
            f"{dtype} would round the state that training resumes from; ask for weights only (--weights-only), or "
            "leave the format at fp32"
        )
    out = Path(os.path.abspath(out))
    reader = CheckpointReader(checkpoint)
    _refuse_taken(out, overwrite)
    _refuse_other(out, reader, weights_only)
    if problems := reader.verify():
        raise CheckpointError("\n  ".join([f"{checkpoint} is damaged; merge an older one", *problems]))
    tensors = reader.manifest.tensors
    names = [name for name in tensors if is_of_model(name) or not weights_only]
    formats = {name: DTYPES[dtype] if name.startswith("weight/") else torch.float32 for name in names}
    entries = {name: Entry(name, tensors[name].shape, formats[name]) for name in names}
    num_bytes = sum(entry.num_bytes for entry in entries.values())
    with _building(out, num_bytes) as folder:
        files, written = _write_tensors(reader, folder, entries, max_file_bytes, is_model=weights_only)
        _write_rest(reader, folder, files, written)
    return Merged(checkpoint, out, len(entries), num_bytes, len(files))


def _write_tensors(
    reader: CheckpointReader, folder: Path, entries: dict[str, Entry], max_file_bytes: int, *, is_model: bool
) -> tuple[dict[str, FileRecord], dict[str, TensorRecord]]:
    """Write the tensors into files; what the manifest is to say of both.

    Args:
        is_model: they are the weights of the model, averaged where the run averages.
    """
    files, tensors = {}, {}
    sizes = {name: entry.num_bytes for name, entry in entries.items()}
    for number, names in enumerate(group_by_size(sizes, max_file_bytes)):
        file_name = f"merged-{number:05d}.safetensors"
        with TensorFile(folder / file_name, [entries[name] for name in names]) as file:
            for name in names:
                for slab in model_slabs(reader, name) if is_model else reader.slabs(name):
                    file.write(as_bytes(slab.to(entries[name].dtype)))
                shape = entries[name].shape
                tensors[name] = TensorRecord(shape, [Piece(file_name, name, (0,) * len(shape), shape)])
        files[file_name] = file.record
    return files, tensors


def _write_rest(
    reader: CheckpointReader, folder: Path, files: dict[str, FileRecord], tensors: dict[str, TensorRecord]
) -> None:
    """Copy what else the checkpoint holds, and write the manifest, last of all."""
    old = reader.manifest
    of_tensors = {file for record in old.tensors.values() for piece in record.pieces for file in piece.files}
    others = {name: record for name, record in old.files.items() if name not in of_tensors}
    for name in others:
        shutil.copyfile(reader.folder / name, folder / name)
        sync(folder / name)
    data = dict(old.data)
    if (tokenizer := data.get("tokenizer")) and (reader.folder.parent / tokenizer).is_dir():
        data["tokenizer"] = str((reader.folder.parent / tokenizer).resolve())  # an import names the one beside it
    write_manifest(folder, replace(old, tensors=tensors, files={**files, **others}, data=data, megalite=__version__))
    sync(folder)


def _refuse_other(out: Path, source: CheckpointReader, weights_only: bool) -> None:
    """Refuse to make what nobody could use, or to lose what the source alone has."""
    step = source.manifest.progress.step
    if step_of_folder(out) not in (None, step):
        raise CheckpointError(f"{out}: named as another step; the checkpoint holds step {step}, {folder_name(step)}")
    if weights_only and os.path.realpath(out) == os.path.realpath(source.folder):
        raise CheckpointError(f"{out}: is what is merged, and would lose its moments; choose another folder")


def _refuse_taken(out: Path, overwrite: bool) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not overwrite:
        raise CheckpointError(f"{out}: already there; choose another folder, or replace it with --overwrite")
    if not (out / MANIFEST).is_file():
        raise CheckpointError(f"{out}: not a checkpoint, so it is not replaced; choose another or remove it yourself")


def _require_room(out: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(out.parent).free
    if free < num_bytes * DISK_MARGIN:
        raise CheckpointError(
            f"{out}: needs {size(num_bytes)} and the disk has {size(free)} free; make room, or choose another disk"
        )


@contextmanager
def _building(out: Path, num_bytes: int) -> Iterator[Path]:
    """A locked folder beside `out` to build in; it becomes `out` at the end, or goes away when something fails."""
    folder = out.with_name(f"{MERGING}{out.name}-{os.getpid()}-{time.time_ns()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _require_room(out, num_bytes)
        _sweep(out)
        folder.mkdir()
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise CheckpointError(f"{out}: not written ({error})") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield folder
        commit(folder, out)
        sync(out.parent)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):  # a disk that is full after all, or gone
            raise CheckpointError(f"{out}: not written ({error}); what was there before is untouched") from error
        raise
    finally:
        os.close(descriptor)


def _sweep(out: Path) -> None:
    """Remove what dead merges to the same place left; a living one holds a lock."""
    for leftover in out.parent.glob(f"{MERGING}{out.name}-*"):
        try:
            descriptor = os.open(leftover, os.O_RDONLY)
        except FileNotFoundError:  # just renamed
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(leftover, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(descriptor)
