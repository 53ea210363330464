"""A full disk: what is missing is said, and small notes wait for room."""

from __future__ import annotations

import errno
import json

import pytest

from megalite.slurm import room
from megalite.slurm.folder import LaunchFolder
from megalite.slurm.room import lack_of_room, note


def test_what_is_missing(tmp_path):
    """Nothing before there is a plan; then room for one more checkpoint of its parameters."""
    assert lack_of_room(tmp_path) is None
    (tmp_path / "plan.json").write_text(json.dumps({"num_parameters": 1000}))
    assert lack_of_room(tmp_path) is None
    (tmp_path / "plan.json").write_text(json.dumps({"num_parameters": 10**15}))
    assert "the next checkpoint needs" in lack_of_room(tmp_path)


def test_a_note_waits_for_room(monkeypatch):
    """It is tried again while the disk is full, for a while; another fault is told at once."""
    monkeypatch.setattr(room, "SECONDS_BETWEEN_LOOKS", 0.01)
    faults = [errno.ENOSPC, errno.EDQUOT]

    def write() -> None:
        if faults:
            raise OSError(faults.pop(0), "no")

    note(write, patience_seconds=60)
    assert faults == []
    faults += [errno.ENOSPC] * 100
    with pytest.raises(OSError, match="no"):
        note(write, patience_seconds=0.05)
    faults[:] = [errno.EIO, errno.ENOSPC]
    with pytest.raises(OSError, match="no"):
        note(write, patience_seconds=60)
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
