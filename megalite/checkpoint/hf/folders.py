"""Folders of a conversion: which checkpoint is meant, and an output that is there whole or not at all."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megalite.checkpoint import catalog
from megalite.checkpoint.format import MANIFEST
from megalite.errors import CheckpointError, ConversionError
from megalite.page.numbers import size

OURS = ("config.json", "step-0000000", "adapter_config.json")
"""What a folder made by a conversion has; nothing else is ever replaced."""


def find_checkpoint(folder: Path) -> Path:
    """A checkpoint's own folder, or the newest complete one of a run.

    Raises:
        CheckpointError: there is none.
    """
    if (folder / MANIFEST).is_file():
        return folder
    newest = catalog.latest(folder) if folder.is_dir() else None
    if newest is None:
        why = "no complete checkpoint in it" if folder.is_dir() else "no such folder"
        raise CheckpointError(
            f"{folder}: {why}; give a step-… folder, or a run's folder with {catalog.CHECKPOINTS}/step-…"
        )
    return newest


def require_room(out: Path, num_bytes: int) -> None:
    """Refuse to begin what the disk has no room for.

    Raises:
        ConversionError: with what is free and what is needed.
    """
    place = next(parent for parent in out.absolute().parents if parent.is_dir())
    free = shutil.disk_usage(place).free
    if free < num_bytes * catalog.DISK_MARGIN:
        raise ConversionError(
            f"{out}: needs {size(num_bytes)} and the disk has {size(free)} free; make room, or choose another disk"
        )


@contextmanager
def building(out: Path, *, overwrite: bool) -> Iterator[Path]:
    """A folder beside `out` to build in; it becomes `out` at the end, or goes away when something fails.

    Args:
        out: where the result will be.
        overwrite: an older result may be replaced, once the new one is whole.

    Raises:
        ConversionError: `out` is taken or cannot be written, or the disk became full.
    """
    _refuse_taken(out, overwrite)
    partial, old = out.with_name(f"{out.name}.partial"), out.with_name(f"{out.name}.old")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        if out.exists():
            shutil.rmtree(old, ignore_errors=True)
            out.rename(old)
        partial.rename(out)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        why = "the disk is full; make room, or choose another disk" if full else f"not written ({error})"
        raise ConversionError(f"{out}: {why}") from error
    shutil.rmtree(old, ignore_errors=True)


def _refuse_taken(out: Path, overwrite: bool) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not overwrite:
        raise ConversionError(f"{out}: already there; choose another folder, or replace it with --overwrite")
    if not any((out / name).exists() for name in OURS):
        raise ConversionError(
            f"{out}: not a model's folder, so it is not replaced; choose another or remove it yourself"
        )
