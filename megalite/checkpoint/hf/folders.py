"""Folders of a conversion: which checkpoint is meant, and an output that is there whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from megalite.checkpoint import catalog
from megalite.checkpoint.format import MANIFEST
from megalite.errors import CheckpointError, ConversionError
from megalite.page.numbers import size

OURS = ("config.json", "step-0000000", "adapter_config.json")
"""What a folder made by a conversion has; nothing else is ever replaced."""

CONVERTING = ".converting-"
"""Begins the names of folders in which conversions work."""


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
def building(out: Path, *, inputs: Sequence[Path], overwrite: bool) -> Iterator[Path]:
    """A folder to build in, of `out`'s name; it becomes `out` at the end, or goes away when something fails.

        .converting-OUT-.../OUT           beside `out`, made by this call alone, locked while it lives
        .converting-OUT-.../former-OUT    what is replaced, between two renames

    What a killed conversion left is removed by the next one to `out`, and what it was about to replace is put back.

    Args:
        out: where the result will be.
        inputs: folders that it is made of.
        overwrite: an older result may be replaced, once the new one is whole.

    Raises:
        ConversionError: `out` is taken, an input or cannot be written, or the disk became full.
    """
    _refuse_inputs(out, inputs)
    if os.path.ismount(out):
        raise ConversionError(f"{out}: a disk is mounted there, so no folder can be renamed to it; give {out / 'NAME'}")
    try:
        _sweep(out)
        _refuse_taken(out, overwrite)
        out.parent.mkdir(parents=True, exist_ok=True)
        with _working(out) as work:
            made = work / out.name
            made.mkdir()
            yield made
            _refuse_taken(out, overwrite)  # another conversion may have been sooner
            if out.exists():
                out.rename(_former(work, out))
            made.rename(out)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        why = "the disk is full; make room, or choose another disk" if full else f"not written ({error})"
        raise ConversionError(f"{out}: {why}") from error


@contextmanager
def _working(out: Path) -> Iterator[Path]:
    """A locked folder beside `out` that nobody else has or can guess; it is cleared away in the end."""
    while True:
        work = out.with_name(f"{CONVERTING}{out.name}-{secrets.token_hex(8)}")
        work.mkdir()
        try:
            descriptor = os.open(work, os.O_RDONLY)
        except FileNotFoundError:  # swept by another conversion, which took its owner for dead
            continue
        try:
            with suppress(OSError):  # a disk without locks, where nobody else gets one either
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if not work.is_dir():  # swept by another conversion before it was locked
                continue
            try:
                yield work
            finally:
                with suppress(OSError):
                    _clear(work, out)
            return
        finally:
            os.close(descriptor)


def _sweep(out: Path) -> None:
    """Clear away what dead conversions to `out` left; a living one holds a lock."""
    pattern = re.compile(f"{re.escape(CONVERTING + out.name)}-[0-9a-f]{{16}}")
    beside: list[Path] = []
    with suppress(OSError):  # it is not there yet, or may be written to and not listed
        beside = list(out.parent.iterdir())
    for work in (each for each in beside if pattern.fullmatch(each.name)):
        with suppress(OSError):  # it lives, has just gone, or cannot be cleared away by this user
            descriptor = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _clear(work, out)
            finally:
                os.close(descriptor)


def _clear(work: Path, out: Path) -> None:
    """Remove a conversion's folder, unless what it was about to replace is in it and cannot be put back."""
    former = _former(work, out)
    if os.path.lexists(former) and not os.path.lexists(out):
        former.rename(out)
    shutil.rmtree(work, ignore_errors=True)


def _former(work: Path, out: Path) -> Path:
    return work / f"former-{out.name}"


def _refuse_inputs(out: Path, inputs: Sequence[Path]) -> None:
    """Refuse to replace what is read, or what has it in it. A place inside may be: files of folders alone are read."""
    place = Path(os.path.realpath(out))
    for each in inputs:
        read = Path(os.path.realpath(each))
        if place in (read, *read.parents):
            where = "is" if place == read else "has in it"
            raise ConversionError(f"{out}: {where} what is read here, {each}; choose another folder")


def _refuse_taken(out: Path, overwrite: bool) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not overwrite:
        raise ConversionError(f"{out}: already there; choose another folder, or replace it with --overwrite")
    if not any((out / name).exists() for name in OURS):
        raise ConversionError(
            f"{out}: not a model's folder, so it is not replaced; choose another or remove it yourself"
        )
