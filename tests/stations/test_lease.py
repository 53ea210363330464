"""The lock on a folder: one owner at a time, which a dead one does not keep, here or on another machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from megalite.errors import DataError, UserError
from megalite.stations import lease as module
from megalite.stations.lease import Lease, Owner


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Beats and silence in hundredths of their time."""
    monkeypatch.setattr(module, "SECONDS_BETWEEN_BEATS", 0.02)
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LOOKS", 0.005)
    monkeypatch.setattr(module, "SILENCE_SECONDS", 0.3)


def lease(folder: Path) -> Lease:
    return Lease(folder / "out.lock", folder / "out")


def leave(folder: Path, **changes: object) -> Owner:
    """A lock as an owner left it."""
    owner = Owner.here().model_copy(update=changes)
    (folder / "out.lock").write_bytes(module._record(owner))
    return owner


def elsewhere(monkeypatch) -> None:
    """From here on this is another machine."""
    monkeypatch.setattr(module, "this_machine", lambda: "another boot of another kernel")


def test_one_at_a_time(tmp_path):
    """The second is refused by name, also within one process; when the first has left, nothing stays."""
    refused = pytest.raises(UserError, match=rf"out: process {os.getpid()} on .* is at work here; let it end")
    with lease(tmp_path), refused, lease(tmp_path):
        pass
    with lease(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_living_owner_on_another_machine(tmp_path, monkeypatch):
    """Its beat moves, so it is refused long before the silence is over."""
    with lease(tmp_path):
        elsewhere(monkeypatch)
        monkeypatch.setattr(module, "SILENCE_SECONDS", 30.0)
        with pytest.raises(UserError, match="is at work here"), lease(tmp_path):
            pass


def test_a_dead_owner_on_another_machine(tmp_path, capsys):
    """Its beat stands still; after the silence the lock is the next one's, and that is said meanwhile."""
    leave(tmp_path, machine="another", host="node17", pid=4711)
    with lease(tmp_path) as mine:
        assert not mine.is_lost()
    assert "process 4711 on node17 was at work here; waiting" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("started", [None, "1"])
def test_a_dead_owner_on_this_machine(tmp_path, monkeypatch, started):
    """kill -9, and nobody waits: the kernel knows, also when the number of the process is in use again."""
    monkeypatch.setattr(module, "SILENCE_SECONDS", 1000.0)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    leave(tmp_path, pid=process.pid, started=started or module._state(process.pid)[1])
    if started is None:
        process.kill()  # not waited for: a zombie is dead, too
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    with lease(tmp_path):
        pass
    process.kill()
    process.communicate()


@pytest.mark.parametrize("content", [b"", b"\0" * 512, b"process 1 on a\n", b'{"token": "x"}', b"[" * 600])
def test_a_lock_that_is_no_record(tmp_path, content):
    """Left by a crash in the very moment of making it: it gives no sign of life."""
    (tmp_path / "out.lock").write_bytes(content)
    with lease(tmp_path):
        pass


def test_an_owner_that_slept_notices(tmp_path, monkeypatch):
    """A machine that stood still loses its lock; when it wakes up it neither works on nor takes the other's away."""
    monkeypatch.setattr(module, "SECONDS_BETWEEN_BEATS", 1000.0)  # asleep
    first = lease(tmp_path)
    with first:
        monkeypatch.setattr(module, "SECONDS_BETWEEN_BEATS", 0.02)
        elsewhere(monkeypatch)
        with lease(tmp_path) as second:
            assert first.is_lost()
            with pytest.raises(UserError, match="another process has taken over here"):
                first.check()
            first.__exit__()
            assert not second.is_lost()
            second.check()


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads change places a thousand times as often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(before / 1000)
    yield
    sys.setswitchinterval(before)


def test_of_many_that_find_it_dead_one_wins(tmp_path, restless):
    """Sixteen at once, in every order that the scheduler brings: never two owners."""
    owners, most, guard = [], [], threading.Lock()

    def take() -> None:
        try:
            with lease(tmp_path):
                with guard:
                    owners.append(1)
                    most.append(len(owners))
                threading.Event().wait(0.005)
                with guard:
                    owners.pop()
        except UserError:
            pass

    for _ in range(50):
        leave(tmp_path, pid=2**22 + 1)  # beyond every kernel's limit
        threads = [threading.Thread(target=take) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not list(tmp_path.iterdir())
    assert len(most) >= 50
    assert max(most) == 1


def test_who_comes_late_leaves_the_successor_alone(tmp_path):
    """Found a dead owner, and was then stopped while another followed it: takes nothing, and is refused."""
    path = tmp_path / "out.lock"
    dead, late = leave(tmp_path, pid=2**22 + 1), lease(tmp_path)
    with lease(tmp_path) as living:
        made = path.stat().st_ino
        assert not late._follow(path, dead)
        assert not living.is_lost()
        assert path.stat().st_ino == made
        with pytest.raises(UserError, match="is at work here"):
            late.__enter__()
    assert list(tmp_path.iterdir()) == []


def test_who_wanted_to_follow_a_dead_owner_and_died(tmp_path):
    """Its right to do so is taken over as the lock would be."""
    dead = leave(tmp_path, pid=2**22 + 1)
    heir = leave(tmp_path, pid=2**22 + 2)
    right = tmp_path / f"out.lock.{dead.token[: module.SHORT]}"
    (tmp_path / "out.lock").rename(right)
    right.with_name(f"{right.name}.{heir.token[: module.SHORT]}").write_bytes(b"")
    (tmp_path / "out.lock").write_bytes(module._record(dead))
    with lease(tmp_path) as mine:
        assert not mine.is_lost()
    assert list(tmp_path.iterdir()) == []


def test_a_full_or_silent_disk_takes_nothing(tmp_path, monkeypatch):
    """The beat needs no room. A disk that does not answer is no other owner."""
    with lease(tmp_path) as mine:
        size = (tmp_path / "out.lock").stat().st_size
        for _ in range(1000):
            if json.loads((tmp_path / "out.lock").read_bytes())["beat"] > 3:
                break
            threading.Event().wait(0.01)
        assert (tmp_path / "out.lock").stat().st_size == size == module.RECORD_BYTES

        def stale(path: Path) -> None:
            raise OSError(116, "Stale file handle")

        monkeypatch.setattr(module, "_read", stale)
        assert not mine.is_lost()
        monkeypatch.undo()


def test_a_folder_where_nothing_can_be_made(tmp_path):
    """Said as the user's matter."""
    (tmp_path / "file").write_text("")
    (tmp_path / "out.lock").mkdir()
    with pytest.raises(DataError, match=r"out.lock: is a folder, where the lock of .*out would lie"), lease(tmp_path):
        pass
    with pytest.raises(DataError, match="out: cannot be made: Not a directory; choose another folder"):
        lease(tmp_path / "file").__enter__()


def test_processes_one_after_the_other(tmp_path):
    """A real owner, killed: the next has the lock at once. Its record is what the class says."""
    code = "import sys; from pathlib import Path; from megalite.stations.lease import Lease; p = Path(sys.argv[1])\n"
    code += "with Lease(p / 'out.lock', p / 'out'):\n    print('mine', flush=True)\n    sys.stdin.read()"
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "mine\n"
        record = json.loads((tmp_path / "out.lock").read_bytes())
        assert record.keys() == Owner.model_fields.keys()
        with pytest.raises(UserError, match=f"process {process.pid} on .* is at work here"), lease(tmp_path):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
        with lease(tmp_path):
            pass
