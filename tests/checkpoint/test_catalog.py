"""Which checkpoints count, which go, and what an interrupted save leaves behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalite.checkpoint import catalog
from megalite.checkpoint.format import MANIFEST
from megalite.errors import CheckpointError


def make(root: Path, step: int, *, whole: bool = True) -> Path:
    folder = root / f"step-{step:07d}"
    folder.mkdir(parents=True)
    if whole:
        (folder / MANIFEST).write_text("{}")
    return folder


def test_only_whole_checkpoints_count(tmp_path):
    """A folder without manifest, a half-written one and a half-deleted one are not checkpoints."""
    root = tmp_path / "checkpoints"
    make(root, 10)
    make(root, 5)
    make(root, 20, whole=False)
    (root / f"{catalog.PARTIAL}step-0000030").mkdir()
    (root / f"{catalog.DELETED}step-0000001").mkdir()
    assert [catalog.step_of(path) for path in catalog.complete(tmp_path)] == [5, 10]
    assert catalog.complete(root) == catalog.complete(tmp_path)
    assert catalog.latest(tmp_path) == root / "step-0000010"
    assert catalog.complete(root / "step-0000005") == [root / "step-0000005"]
    assert catalog.latest(tmp_path / "nothing") is None


def test_sweep_removes_what_was_interrupted(tmp_path):
    """Partial and half-deleted folders go, checkpoints stay."""
    make(tmp_path, 1)
    for prefix in (catalog.PARTIAL, catalog.DELETED):
        (tmp_path / f"{prefix}step-0000009").mkdir()
    catalog.sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000001"]


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "kept"),
    [(2, None, [40, 50]), (1, 20, [20, 40, 50]), (3, 25, [30, 40, 50]), (9, None, [10, 20, 30, 40, 50])],
)
def test_retention(tmp_path, keep_last, keep_every, kept):
    """The newest stay, and multiples of keep_every for ever; the newest is never deleted."""
    for step in (10, 20, 30, 40, 50):
        make(tmp_path, step)
    catalog.prune(tmp_path, keep_last=keep_last, keep_every=keep_every)
    assert [catalog.step_of(path) for path in catalog.complete(tmp_path)] == kept


def test_disk_without_room_is_refused(tmp_path):
    """What is needed, what is free, and what to do."""
    with pytest.raises(CheckpointError, match=r"needs .* GB and the disk has .* GB free; make room"):
        catalog.check_disk(tmp_path, num_parameters=10**15)
