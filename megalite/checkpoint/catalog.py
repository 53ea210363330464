"""The checkpoints of a run: which are complete, which is newest, which may go.

Only a folder named `step-…` that has a manifest counts. Half-written and half-deleted ones have other names, and are
swept away when the next checkpoint is written.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from megalite.checkpoint.format import BYTES_PER_PARAMETER, MANIFEST
from megalite.errors import CheckpointError

CHECKPOINTS = "checkpoints"
"""Folder of a run that holds its checkpoints."""

_STEP = re.compile(r"step-(\d{7,})")
PARTIAL = ".partial-"
DELETED = ".deleted-"

DISK_MARGIN = 1.05
"""A checkpoint takes a little more than its numbers."""


def complete(folder: Path) -> list[Path]:
    """Complete checkpoints below a run folder or its `checkpoints` folder, oldest first; a checkpoint is its own."""
    if (folder / MANIFEST).is_file() and _STEP.fullmatch(folder.resolve().name):
        return [folder]
    base = folder / CHECKPOINTS if (folder / CHECKPOINTS).is_dir() else folder
    found = [path for path in base.glob("step-*") if _STEP.fullmatch(path.name) and (path / MANIFEST).is_file()]
    return sorted(found, key=step_of)


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    found = complete(folder)
    return found[-1] if found else None


def step_of(folder: Path) -> int:
    """Step of a checkpoint folder, from its name."""
    match = _STEP.fullmatch(folder.resolve().name)
    assert match is not None, folder
    return int(match.group(1))


def prune(folder: Path, *, keep_last: int, keep_every: int | None) -> list[Path]:
    """Delete checkpoints that are neither among the newest `keep_last` nor at a multiple of `keep_every`.

    Returns:
        The folders that went.
    """
    old = [path for path in complete(folder)[:-keep_last] if not (keep_every and step_of(path) % keep_every == 0)]
    for path in old:
        delete(path)
    return old


def sweep(folder: Path) -> None:
    """Remove what interrupted saves and deletions left behind."""
    for pattern in (f"{PARTIAL}*", f"{DELETED}*"):
        for path in folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def check_disk(folder: Path, num_parameters: int) -> None:
    """Refuse to go on when the disk under `folder` has no room for one more checkpoint.

    Raises:
        CheckpointError: with what is free and what is needed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    needed = int(num_parameters * BYTES_PER_PARAMETER * DISK_MARGIN)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointError(
            f"{folder}: the next checkpoint needs {needed / 1e9:.2f} GB and the disk has {free / 1e9:.2f} GB free; "
            f"make room, lower checkpoint.keep_last, or set run.dir to another disk"
        )


def delete(path: Path) -> None:
    """Remove a checkpoint in two moves, so that it is never half there under its name."""
    doomed = path.with_name(DELETED + path.name)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)
