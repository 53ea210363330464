"""Which checkpoints count, which go, and what an interrupted save leaves behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalite.checkpoint import catalog, listing
from megalite.checkpoint.format import MANIFEST, read_manifest
from megalite.checkpoint.listing import list_checkpoints
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


def test_the_same_step_again(tmp_path):
    """A checkpoint that is replaced is there until the new one is, and comes back when the replacing was cut short."""
    final, partial = make(tmp_path, 5), tmp_path / f"{catalog.PARTIAL}step-0000005-a00001"
    (final / "old").touch()
    partial.mkdir()
    catalog.commit(partial, final)
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000005"]
    assert not (final / "old").exists()

    (final / "old").touch()
    final.rename(tmp_path / f"{catalog.REPLACED}step-0000005")  # and then the process was killed
    catalog.sweep(tmp_path)
    assert (final / "old").exists()
    (tmp_path / f"{catalog.REPLACED}step-0000005").mkdir()  # killed a moment later
    catalog.sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000005"]


def test_a_folder_without_manifest_is_named(tmp_path):
    """It is no checkpoint, but a run is told of it: it once was one."""
    make(tmp_path, 5)
    broken = make(tmp_path, 7, whole=False)
    (tmp_path / f"{catalog.PARTIAL}step-0000009-a00001").mkdir()
    assert [catalog.step_of(path) for path in catalog.named(tmp_path)] == [5, 7]
    assert broken not in catalog.complete(tmp_path)


@pytest.mark.parametrize("kind", ["file", "dangling link", "link to a folder of another name"])
def test_what_only_bears_a_checkpoints_name(tmp_path, kind):
    """It is named by what it is, and it can be set aside and removed; the sound one beside it is the newest."""
    make(tmp_path, 5)
    stray, elsewhere = tmp_path / "step-0000009", tmp_path / "elsewhere"
    if kind == "file":
        stray.touch()
    else:
        stray.symlink_to(elsewhere)
    if kind == "link to a folder of another name":
        elsewhere.mkdir()
    words = {"file": "no folder, so no checkpoint", "dangling link": "a link to .*elsewhere, which is not there"}
    with pytest.raises(CheckpointError, match=words.get(kind, "no manifest.json")):
        read_manifest(stray)
    assert [row.step for row in list_checkpoints(tmp_path).checkpoints] == [5, 9]
    assert [catalog.step_of(path) for path in catalog.named(tmp_path)] == [5, 9]
    assert catalog.latest(tmp_path) == tmp_path / "step-0000005"
    catalog.remove(catalog.set_aside(stray))
    assert catalog.damaged(tmp_path) == []
    assert not list(tmp_path.glob(f"{catalog.DELETED}*"))


@pytest.mark.parametrize("moment", ["inspect", "_disk_bytes", "_modified"])
def test_a_list_beside_a_run_that_removes(moment: str, tmp_path, monkeypatch):
    """A checkpoint that goes while it is looked at is none of the list; where all have gone, that is said."""
    make(tmp_path, 5)
    make(tmp_path, 9)
    usual = getattr(listing, moment)

    def later(folder, *others, **options):
        if folder.name == going:
            catalog.remove(folder)
        return usual(folder, *others, **options)

    monkeypatch.setattr(listing, moment, later)
    going = "step-0000005"
    assert [row.step for row in list_checkpoints(tmp_path).checkpoints] == [9]
    going = "step-0000009"
    with pytest.raises(CheckpointError, match="removed while"):
        list_checkpoints(tmp_path)


def test_disk_without_room_is_refused(tmp_path):
    """What is needed, what is free, and what to do."""
    with pytest.raises(CheckpointError, match=r"needs .* TB and the disk has .*B free; make room"):
        catalog.check_disk(tmp_path, num_parameters=10**15)
