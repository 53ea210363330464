"""A disk that is full or closed: what is wrong is said, and small notes wait until it is mended."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from megalite.slurm import storage
from megalite.slurm.folder import LaunchFolder
from megalite.slurm.storage import STORAGE_FAULTS, find_fault, retry_on_disk_fault


def test_what_is_missing(tmp_path):
    """Nothing before there is a plan; then room for one more checkpoint of its parameters."""
    assert find_fault(tmp_path) is None
    (tmp_path / "plan.json").write_text(json.dumps({"num_parameters": 1000}))
    assert find_fault(tmp_path) is None
    (tmp_path / "plan.json").write_text(json.dumps({"num_parameters": 10**15}))
    assert "the next checkpoint needs" in find_fault(tmp_path)


@pytest.mark.parametrize("closed", [".", "slurm", "checkpoints"])
def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch, closed):
    """Each that a run writes into; the probe leaves nothing behind."""
    for name in ("slurm", "checkpoints"):
        (tmp_path / name).mkdir()
    assert find_fault(tmp_path) is None
    assert not any(path.is_file() for path in tmp_path.rglob("*"))
    write_bytes = Path.write_bytes

    def write(path: Path, data: bytes) -> int:  # chmod does not keep root out
        if path.parent == (tmp_path / closed):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return write_bytes(path, data)

    monkeypatch.setattr(Path, "write_bytes", write)
    assert find_fault(tmp_path) == f"{tmp_path / closed} cannot be written (Read-only file system)"


def test_a_note_waits_for_the_disk(monkeypatch):
    """It is tried again while a person could mend the disk, for a while; another fault is told at once."""
    monkeypatch.setattr(storage, "POLL_SECONDS", 0.0)
    faults = list(STORAGE_FAULTS)

    def write() -> str:
        if faults:
            raise OSError(faults.pop(0), "no")
        return "written"

    assert retry_on_disk_fault(write, patience_seconds=60) == "written"
    assert faults == []
    faults += [errno.ENOSPC] * 10**6
    with pytest.raises(OSError, match="no"):
        retry_on_disk_fault(write, patience_seconds=0.05)
    faults[:] = [errno.EISDIR, errno.ENOSPC]
    with pytest.raises(OSError, match="no"):
        retry_on_disk_fault(write, patience_seconds=60)
    assert faults == [errno.ENOSPC]


def test_an_event_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    """Half a line would stop everyone who reads the file."""
    folder = LaunchFolder(tmp_path)
    folder.path.mkdir()
    folder.add_event("job", job="1")
    before = folder.events.read_bytes()

    def dumps(event):
        with open(folder.events, "ab") as file:
            file.write(b'{"time": 1')
        raise OSError(errno.ENOSPC, "no")

    monkeypatch.setattr(json, "dumps", dumps)
    with pytest.raises(OSError, match="no"):
        folder.add_event("end")
    assert folder.events.read_bytes() == before
