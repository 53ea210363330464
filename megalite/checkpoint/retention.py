"""Retention: which checkpoints stay when a new one has been committed.

Kept are the newest `keep_last`, those whose step is a multiple of `keep_every`, and the `keep_best` with the lowest
validation loss, and single steps such as the last one before a decay. Damaged ones never count among these: two good
ones and a broken one are not three. A damaged one that would have stayed is set aside, since it may be mended; one with
another step's name is let be.

Nothing is removed unless a checkpoint that stays is known to be whole. The one just committed is, its checksums having
been taken while it was written; otherwise the newest are read back until one is found, among those to be removed too,
which then stays.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from megalite.checkpoint.catalog import BEST, complete, name_problem, remove, set_aside, step_of, validation_loss
from megalite.checkpoint.format import read_manifest
from megalite.checkpoint.reader import CheckpointReader
from megalite.errors import CheckpointError


@dataclass(frozen=True)
class Keep:
    """The settings of that name in the section `checkpoint`."""

    last: int = 1
    every: int | None = None
    best: int | None = None
    steps: frozenset[int] = frozenset()
    """Kept for ever, whatever comes after."""


@dataclass(frozen=True)
class Pruned:
    """What became of checkpoints that did not stay, oldest first."""

    removed: tuple[Path, ...] = ()
    set_aside: tuple[Path, ...] = ()
    """Where damaged ones are now."""


def prune(folder: Path, keep: Keep, just_written: Path | None = None) -> Pruned:
    """Remove the checkpoints of a run that need not stay.

    Args:
        folder: the run's `checkpoints` folder.
        keep: which are to stay.
        just_written: a checkpoint known to be whole.

    Returns:
        Those that went.
    """
    found = [path for path in complete(folder) if name_problem(path) is None]
    sound = [path for path in found if has_all_files(path)]
    stay = set(_chosen(sound, keep))
    doomed = [path for path in found if path not in stay]
    if not doomed:
        return Pruned()
    if just_written not in stay:
        by_age = sorted(stay, key=step_of, reverse=True) + [path for path in reversed(sound) if path not in stay]
        good = next((path for path in by_age if is_whole(path)), None)
        if good is None:
            return Pruned()  # nothing is known to be good: nothing may go
        stay.add(good)
    wanted = set(_chosen(found, keep)) - set(sound)
    doomed = [path for path in doomed if path not in stay | wanted]
    for path in doomed:
        remove(path)
    return Pruned(tuple(doomed), tuple(set_aside(path) for path in sorted(wanted, key=step_of)))


def point_at_best(folder: Path) -> Path | None:
    """Let the link `best` of a run point at its checkpoint with the lowest validation loss, of those that are there.

    Args:
        folder: the run's `checkpoints` folder.

    Returns:
        That checkpoint; None when none was validated, and then there is no link.
    """
    link, partial = folder.parent / BEST, folder.parent / f".{BEST}.partial"
    losses = {path: loss for path in complete(folder) if (loss := validation_loss(path)) is not None}
    if not losses:
        if link.is_symlink():
            link.unlink()
        return None
    best = min(losses, key=lambda path: (losses[path], -step_of(path)))
    if link.exists() and not link.is_symlink():
        return best  # a copy of the run that followed the link has a folder there
    partial.unlink(missing_ok=True)
    partial.symlink_to(best.relative_to(folder.parent), target_is_directory=True)
    os.replace(partial, link)
    return best


def has_all_files(folder: Path) -> bool:
    """Whether every file of a checkpoint is there in its full size: what can be told without reading it."""
    try:
        files = read_manifest(folder).files
        return all((folder / name).stat().st_size == record.bytes for name, record in files.items())
    except (OSError, CheckpointError):
        return False


def is_whole(folder: Path) -> bool:
    """Whether every file of a checkpoint has its checksum."""
    try:
        return not CheckpointReader(folder).verify()
    except CheckpointError:
        return False


def _chosen(sound: list[Path], keep: Keep) -> list[Path]:
    chosen = sound[-keep.last :]
    chosen += [path for path in sound if step_of(path) in keep.steps]
    if keep.every:
        chosen += [path for path in sound if step_of(path) % keep.every == 0]
    if keep.best:
        losses = {path: loss for path in sound if (loss := validation_loss(path)) is not None}
        chosen += sorted(losses, key=lambda path: (losses[path], -step_of(path)))[: keep.best]
    return chosen
