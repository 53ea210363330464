"""The checkpoints of a run: which are complete, which is newest, which may go.

Only a folder named `step-…` that has a manifest counts. Half-written and half-deleted ones have other names, and are
swept away when the next checkpoint is written.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

from megalite.checkpoint.format import BYTES_PER_PARAMETER, MANIFEST, read_manifest, step_of_folder, step_of_name
from megalite.errors import CheckpointError, MisnamedError
from megalite.page.numbers import size

CHECKPOINTS = "checkpoints"
"""Folder of a run that holds its checkpoints."""

BEST = "best"
"""Link in a run's folder to its checkpoint with the lowest validation loss."""

VALIDATION = "validation.json"
"""In a checkpoint: the validation loss of its step, where there was one."""

_ATTEMPT = re.compile(r".*-a(\d+)")
PARTIAL = ".partial-"
"""Being written: `.partial-step-0000123-a00002`, by attempt 2."""
DELETED = ".deleted-"
REPLACED = ".replaced-"
"""Was there already when the same step was saved again."""
DAMAGED = "damaged-"
"""Set aside, because what is wrong with it may be mended: `damaged-step-0000123`."""
MOST_DAMAGED = 2
"""As many stay; an older one goes when another is set aside."""

DISK_MARGIN = 1.05
"""A checkpoint takes a little more than its numbers."""


def named(folder: Path) -> list[Path]:
    """Folders called like a checkpoint in a `checkpoints` folder, oldest first. One without manifest was damaged after
    it had got its name."""
    return sorted((path for path in folder.glob("step-*") if step_of_name(path.name) is not None), key=step_of)


def complete(folder: Path) -> list[Path]:
    """Complete checkpoints below a run folder or its `checkpoints` folder, oldest first; a checkpoint is its own."""
    if (folder / MANIFEST).is_file() and step_of_folder(folder) is not None:
        return [folder]
    base = folder / CHECKPOINTS if (folder / CHECKPOINTS).is_dir() else folder
    return [path for path in named(base) if (path / MANIFEST).is_file()]


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint that is not named after another step, or None."""
    return next((path for path in reversed(complete(folder)) if name_problem(path) is None), None)


def step_of(folder: Path) -> int:
    """Step of a checkpoint folder, from its name."""
    step = step_of_folder(folder)
    assert step is not None, folder
    return step


def name_problem(folder: Path) -> str | None:
    """What is wrong with a checkpoint that has another step's name; None where the name is its own."""
    try:
        read_manifest(folder)
    except MisnamedError as error:
        return str(error)
    except CheckpointError:
        pass
    return None


def validation_loss(folder: Path) -> float | None:
    """Validation loss at a checkpoint's step; None where it was not measured at this very step."""
    try:
        loss = float(json.loads((folder / VALIDATION).read_text(encoding="utf-8"))["loss"])
        return loss if math.isfinite(loss) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def commit(partial: Path, final: Path) -> None:
    """Give a finished folder its name. One of the same step, from before a resume, steps aside first: at every moment
    one of the two is there, or `sweep` brings it back."""
    if not final.exists():
        partial.rename(final)
        return
    former = final.with_name(REPLACED + final.name)
    remove(former)
    final.rename(former)
    partial.rename(final)
    remove(former)


def sweep(folder: Path, attempt: int | None = None) -> None:
    """Remove what interrupted saves and deletions left behind, and bring back what was about to be replaced.

    Args:
        attempt: of the caller; what a newer attempt is writing is left alone.
    """
    for path in folder.glob(f"{REPLACED}*"):
        final = path.with_name(path.name.removeprefix(REPLACED))
        if final.exists():
            remove(path)
        else:
            path.rename(final)
    for path in folder.glob(f"{PARTIAL}*"):
        match = _ATTEMPT.fullmatch(path.name)
        if attempt is None or match is None or int(match.group(1)) <= attempt:
            remove(path)
    for path in folder.glob(f"{DELETED}*"):
        _erase(path)


def set_aside(path: Path) -> Path:
    """Take a damaged checkpoint out of the run's way without losing it; its new place.

    Only the newest few stay. One that has been mended takes part again under its old name.
    """
    aside = path.with_name(DAMAGED + path.name)
    remove(aside)
    path.rename(aside)
    for older in damaged(path.parent)[:-MOST_DAMAGED]:
        remove(older)
    return aside


def damaged(folder: Path) -> list[Path]:
    """Those that were set aside in a `checkpoints` folder, oldest step first."""
    return sorted(folder.glob(f"{DAMAGED}step-*"))


def check_disk(folder: Path, num_parameters: int) -> None:
    """Refuse to go on when the disk where `folder` is, or will be, has no room for one more checkpoint.

    Raises:
        CheckpointError: with what is free and what is needed.
    """
    needed = int(num_parameters * BYTES_PER_PARAMETER * DISK_MARGIN)
    free = shutil.disk_usage(next(each for each in (folder, *folder.parents) if each.is_dir())).free
    if free < needed:
        raise CheckpointError(
            f"{folder}: the next checkpoint needs {size(needed)} and the disk has {size(free)} free; "
            f"make room, lower checkpoint.keep_last, or set run.dir to another disk"
        )


def remove(path: Path) -> None:
    """Remove a folder, if it is there, in two moves: whoever would rename or read it finds it whole or not at all."""
    doomed = path.with_name(DELETED + path.name)
    _erase(doomed)
    try:
        path.rename(doomed)
    except FileNotFoundError:
        return
    _erase(doomed)


def _erase(path: Path) -> None:
    """Remove a folder with all that is in it, or what bears the name of one: a link or a file."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)
