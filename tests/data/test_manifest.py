"""Stations: done once, whole or not at all, and never over someone else's files."""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from megalite.data.manifest import check_input, find_manifest, run_station
from megalite.errors import DataError
from tests.data.factory import all_bytes


def write(text: str):
    def build(folder: Path) -> dict:
        (folder / "result.txt").write_text(text)
        return {"characters": len(text)}

    return build


def run(out: Path, text: str = "hello", *, station: str = "demo", settings: dict | None = None, hash_: str = "1"):
    return run_station(station, out, inputs=[(out.parent / "input", hash_)], settings=settings or {}, build=write(text))


def test_the_same_work_is_done_once(tmp_path):
    """The second call finds the first one's folder; any other input or setting runs again and replaces it."""
    out = tmp_path / "out"
    assert not run(out).reused
    assert run(out, "never written").reused
    assert (out / "result.txt").read_text() == "hello"
    for change in ({"settings": {"size": 2}}, {"hash_": "2"}):
        assert not run(out, "changed", **change).reused
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_equal_work_leaves_equal_bytes_anywhere(tmp_path):
    """No times, no absolute paths."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        run(tmp_path / name / "out")
    assert all_bytes(tmp_path / "a" / "out") == all_bytes(tmp_path / "b" / "out")


def test_lost_or_shortened_outputs_are_made_again(tmp_path):
    """A manifest alone is not enough to be skipped."""
    out = tmp_path / "out"
    run(out)
    (out / "result.txt").write_text("h")
    assert not run(out).reused
    (out / "result.txt").unlink()
    assert not run(out).reused
    assert (out / "result.txt").read_text() == "hello"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), DataError),
        (OSError(errno.EDQUOT, "Quota exceeded"), DataError),
        (OSError("Not enough free space to write 8000 bytes after offset 128"), DataError),
        (OSError(errno.EIO, "Input/output error"), OSError),
    ],
)
def test_a_full_disk_is_said_and_cleared(tmp_path, error, kind):
    """The half-written folder goes, an older result stays; other faults of the machine keep their traceback."""
    out = tmp_path / "out"
    run(out)

    def fill(folder: Path) -> dict:
        (folder / "big").write_bytes(bytes(1000))
        raise error

    with pytest.raises(kind, match="the disk is full" if kind is DataError else None):
        run_station("demo", out, inputs=[], settings={}, build=fill)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert (out / "result.txt").read_text() == "hello"


def test_kill_9_leaves_no_folder_and_the_next_run_makes_it(tmp_path):
    """A process killed inside a station: only .partial is there, and it does not disturb."""
    script = """
        import os, signal, sys
        from pathlib import Path
        from megalite.data.manifest import run_station
        def build(folder):
            (folder / "result.txt").write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
        run_station("demo", Path(sys.argv[1]), inputs=[], settings={}, build=build)
    """
    out = tmp_path / "out"
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(out)], timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not out.exists()
    with pytest.raises(DataError, match=r"interrupted \(there is a \.partial folder\)"):
        check_input(out, "demo")
    run(out)
    assert (out / "result.txt").read_text() == "hello"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_foreign_folders_are_never_replaced(tmp_path):
    """A folder with files of the user, and one of another station; an empty folder is taken."""
    mine = tmp_path / "mine"
    mine.mkdir()
    run(mine)
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    (thesis / "thesis.tex").write_text("years of work")
    with pytest.raises(DataError, match="already there and not made by megalite"):
        run(thesis)
    with pytest.raises(DataError, match="made by station 'demo'; choose another folder for 'other'"):
        run(mine, station="other")
    assert (thesis / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize(("out", "words"), [("raw", "is .*raw, which is read"), ("raw/out", "lies within .*raw")])
def test_what_is_read_is_not_written_into(tmp_path, out, words):
    """A second run would read the first one's result, or have nothing left to read."""
    raw = tmp_path / "raw"
    raw.mkdir()
    with pytest.raises(DataError, match=words):
        run_station("demo", tmp_path / out, inputs=[(raw, "1")], settings={}, build=write("hello"))
    assert list(raw.iterdir()) == []


def test_a_folder_that_cannot_be_made(tmp_path):
    """A file stands in the way."""
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"out\.partial: cannot be made: Not a directory"):
        run(tmp_path / "file" / "out")


def test_check_input_compares_contents(tmp_path):
    """A changed byte is found by its hash, a changed size without reading."""
    out = tmp_path / "out"
    run(out)
    assert check_input(out, "demo").counts == {"characters": 5}
    (out / "result.txt").write_text("jello")
    check_input(out, "demo", contents=False)
    with pytest.raises(DataError, match=r"result\.txt: its contents have changed"):
        check_input(out, "demo")
    (out / "result.txt").write_text("longer")
    with pytest.raises(DataError, match=r"result\.txt: 6 bytes found, 5 expected"):
        check_input(out, "demo", contents=False)


def test_check_input_wants_the_right_station(tmp_path):
    """No manifest, or another station's."""
    run(tmp_path / "out")
    with pytest.raises(DataError, match="made by station 'demo'; a folder of 'pack' is needed here"):
        check_input(tmp_path / "out", "pack")
    with pytest.raises(DataError, match=r"there is no manifest\.json; run `megalite data pack` first"):
        check_input(tmp_path / "nothing", "pack")


@pytest.mark.parametrize("change", [{"format": 99}, {"inputs": [{"where": "x"}]}, {"extra": 1}])
def test_manifests_of_others_are_refused(tmp_path, change):
    """Another format version, or fields that we do not know."""
    run(tmp_path / "out")
    path = tmp_path / "out" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DataError, match="run its station again"):
        find_manifest(tmp_path / "out")
