"""What checkpoints are there, what is in them, and whether they are sound: the facts behind `megalite checkpoint`.

Files may be shared between checkpoints by hard links, so each is counted once: with the oldest checkpoint of the list
that has it. What a folder takes in the list is then what its save added, and the sum is what the disk gave.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from megalite.checkpoint import catalog
from megalite.checkpoint.format import MANIFEST, Manifest, TensorRecord, read_manifest, step_of_name
from megalite.checkpoint.reader import damage
from megalite.errors import CheckpointError
from megalite.step_lines import is_finite_number, read_step_lines

ITEM_BYTES = 4
"""A number is read as fp32, however it is stored."""

LEFTOVERS = {
    catalog.PARTIAL: "an unfinished save; it goes with the next one",
    catalog.DELETED: "an unfinished deletion; it goes with the next save",
    catalog.REPLACED: "about to be replaced; it goes with the next save, or gets its name back",
    catalog.DAMAGED: f"damaged, set aside to be mended; the newest {catalog.MOST_DAMAGED} stay",
}
EVENTS = "events.jsonl"


@dataclass(frozen=True)
class Listed:
    """A checkpoint in a list."""

    folder: Path
    step: int | None
    """None when neither its manifest nor its name says."""
    saved_at: datetime
    """UTC."""
    manifest: Manifest | None
    """None when it is damaged."""
    problems: tuple[str, ...]
    disk_bytes: int
    """Of files that no older checkpoint of the list has."""
    shared_bytes: int
    """Of files that one has."""
    validation_loss: float | None
    is_best: bool = False
    """The run's link `best` points at it."""

    @property
    def logical_bytes(self) -> int:
        """Bytes of its tensors as fp32."""
        return logical_bytes(self.manifest.tensors.values()) if self.manifest is not None else 0


@dataclass(frozen=True)
class Listing:
    """The checkpoints of a run."""

    checkpoints: tuple[Listed, ...]
    """Oldest first."""
    leftovers: dict[str, str] = field(default_factory=dict)
    """Folders that are no checkpoints, and what they are."""


def list_checkpoints(folder: Path, *, full: bool = False) -> Listing:
    """The checkpoints of a run, or one.

    Args:
        folder: of a run, its checkpoints, or one checkpoint.
        full: compare all checksums, rather than only look for the files and their sizes.

    Raises:
        CheckpointError: there is none.
    """
    found = find(folder)
    losses = _validation_losses(found[0].absolute().parent.parent / EVENTS)
    best = (found[0].absolute().parent.parent / catalog.BEST).resolve()
    seen: set[tuple[int, int]] = set()
    listed = (_row(path, seen, losses, full=full, is_best=path.resolve() == best) for path in found)
    rows = tuple(row for row in listed if row is not None)
    if not rows:
        raise CheckpointError(f"{folder}: its checkpoints were removed while they were looked at; try again")
    return Listing(rows, _leftovers(found[0].parent))


def _row(
    folder: Path, seen: set[tuple[int, int]], losses: dict[int, float], *, full: bool, is_best: bool
) -> Listed | None:
    """A checkpoint as it is listed; None for one that its run has removed meanwhile.

    Args:
        seen: files of those before; its own are added.
        losses: validation loss by step.
    """
    manifest, problems = inspect(folder, full=full)
    step = manifest.progress.step if manifest is not None else step_of_name(folder.absolute().name)
    loss = catalog.validation_loss(folder)
    if loss is None and step is not None:
        loss = losses.get(step)
    own = set(seen)
    try:
        disk_bytes, shared_bytes = _disk_bytes(folder, own)
        saved_at = datetime.fromtimestamp(_modified(folder), timezone.utc)
    except FileNotFoundError:
        return None
    seen |= own
    return Listed(folder, step, saved_at, manifest, problems, disk_bytes, shared_bytes, loss, is_best)


def find(folder: Path) -> list[Path]:
    """A checkpoint's own folder, or those of a run, oldest first; also one that has lost its manifest.

    Raises:
        CheckpointError: there is none.
    """
    if (folder / MANIFEST).is_file() or (folder.is_dir() and step_of_name(folder.absolute().name) is not None):
        return [folder]
    base = folder / catalog.CHECKPOINTS if (folder / catalog.CHECKPOINTS).is_dir() else folder
    found = sorted((path for path in base.glob("step-*") if step_of_name(path.name) is not None), key=catalog.step_of)
    if not found:
        why = "no checkpoint in it" if folder.is_dir() else "no such folder"
        raise CheckpointError(
            f"{folder}: {why}; give a step-… folder, or a run's folder with {catalog.CHECKPOINTS}/step-…"
        )
    return found


def inspect(folder: Path, *, full: bool) -> tuple[Manifest | None, tuple[str, ...]]:
    """A checkpoint's manifest and what is wrong with it; every problem names its file."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return None, (str(error),)
    files = sorted(manifest.files.items())
    found = (damage(folder / name, record, quick=not full) for name, record in files)
    return manifest, tuple(problem for problem in found if problem)


def logical_bytes(records: Iterable[TensorRecord]) -> int:
    """Bytes of whole tensors as fp32."""
    return sum(ITEM_BYTES * math.prod(record.shape) for record in records)


def by_kind(manifest: Manifest) -> dict[str, tuple[int, int]]:
    """Number of tensors, and of numbers in them, of each kind: weight, exp_avg, exp_avg_sq."""
    kinds: dict[str, tuple[int, int]] = {}
    for name, record in manifest.tensors.items():
        kind = name.split("/", 1)[0]
        tensors, numbers = kinds.get(kind, (0, 0))
        kinds[kind] = tensors + 1, numbers + math.prod(record.shape)
    return kinds


def storage(manifest: Manifest) -> str:
    """How its tensors are stored, in a few words."""
    pieces = [piece for record in manifest.tensors.values() for piece in record.pieces]
    linked = sum(record.age > 0 for record in manifest.files.values())
    words = ["differential" if linked else "full"]
    if any(extent.codec for piece in pieces for extent in piece.extents):
        words.append("compressed")
    return ", ".join(words)


def _disk_bytes(folder: Path, seen: set[tuple[int, int]]) -> tuple[int, int]:
    """Bytes of a folder's files that are new to `seen`, and of those that are not; adds them to it."""
    new, shared = 0, 0
    for path in folder.iterdir() if folder.is_dir() else ():
        try:
            status = path.stat()
        except FileNotFoundError:  # a link to what is not there, or removed meanwhile
            continue
        inode = status.st_dev, status.st_ino
        if inode in seen:
            shared += status.st_size
        else:
            new += status.st_size
            seen.add(inode)
    return new, shared


def _modified(folder: Path) -> float:
    manifest = folder / MANIFEST
    return (manifest if manifest.is_file() else folder).lstat().st_mtime


def _leftovers(base: Path) -> dict[str, str]:
    return {
        path.name: what
        for prefix, what in LEFTOVERS.items()
        for path in sorted(base.glob(f"{prefix}*"))
        if path.is_dir()
    }


def _validation_losses(events: Path) -> dict[int, float]:
    """Validation loss by step, from a run's events; those of the last attempt win."""
    validations = (event for event in read_step_lines(events) if event.get("event") == "validation")
    return {event["step"]: float(event["loss"]) for event in validations if is_finite_number(event.get("loss"))}
