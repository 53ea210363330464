"""Stations: done once, whole or not at all, never over someone else's files, and never lost for a fault of a disk."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megalite.corpus.recipe import CleanConfig
from megalite.corpus.stations.clean import clean
from megalite.errors import DataError, UserError
from megalite.progress import NoProgress
from megalite.stations import station as module
from megalite.stations import tasks as tasks_module
from megalite.stations.manifest import check_input
from megalite.stations.runners import InProcess
from megalite.stations.station import StationResult, run_station
from megalite.stations.tasks import OWNER_FILE, WORK_FOLDER, run_tasks
from tests.kit.data import all_bytes, corpus_of, demo_build, prose, write_json_lines
from tests.kit.data import run_demo_station as run

NUM_TASKS = 4


def test_the_same_work_is_done_once(tmp_path):
    """The second call finds the first one's folder; any other input or setting runs again and replaces it."""
    out = tmp_path / "out"
    assert not run(out).reused
    assert run(out, "never written").reused
    assert (out / "result.txt").read_text() == "hello"
    for change in ({"settings": {"size": 2}}, {"hash_": "2"}):
        assert not run(out, "changed", **change).reused
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_a_neighbour_is_kept(tmp_path):
    """OUT.old is somebody's, as who puts a folder aside calls it."""
    out, mine = tmp_path / "out", tmp_path / "out.old"
    run(out)
    out.rename(mine)
    assert not run(out).reused
    assert run(out).reused
    assert not run(out, "changed", hash_="2").reused
    assert (mine / "result.txt").read_text() == "hello"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.old"]


@pytest.mark.parametrize("fault", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
def test_stopped_between_two_renames(tmp_path, monkeypatch, fault):
    """A fault of the disk puts the former result back; what a kill has left there goes with the next run."""
    out = tmp_path / "out"
    run(out)
    replace = os.replace

    def stop(source, target):
        if target == out and source.name == "out.partial":
            raise fault
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(module.os, "replace", stop)
        with pytest.raises(type(fault)):
            run(out, "changed", hash_="2")
    is_kill = isinstance(fault, KeyboardInterrupt)
    assert out.exists() != is_kill
    assert len(list(tmp_path.glob(".out-*.old"))) == is_kill
    assert not run(out, "changed", hash_="2").reused
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
        (OSError(errno.ENOSPC, "No space left on device"), UserError),
        (OSError(errno.EDQUOT, "Quota exceeded"), UserError),
        (OSError("Not enough free space to write 8000 bytes after offset 128"), UserError),
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

    with pytest.raises(kind, match="the disk is full" if kind is UserError else None):
        run_station("demo", out, inputs=[], settings={}, build=fill)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert (out / "result.txt").read_text() == "hello"


def test_kill_9_leaves_no_folder_and_the_next_run_makes_it(tmp_path):
    """A process killed inside a station: only .partial is there, and it does not disturb."""
    script = """
        import os, signal, sys
        from pathlib import Path
        from megalite.stations.station import run_station
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
        run_station("demo", tmp_path / out, inputs=[(raw, "1")], settings={}, build=demo_build("hello"))
    assert list(raw.iterdir()) == []


def test_what_is_read_is_not_replaced(tmp_path):
    """As a file in the folder of an older result."""
    run(tmp_path / "out")
    inputs = [(tmp_path / "out" / "result.txt", "2")]
    with pytest.raises(DataError, match=r"out: has in it .*result\.txt, which is read"):
        run_station("demo", tmp_path / "out", inputs=inputs, settings={}, build=demo_build("changed"))
    assert (tmp_path / "out" / "result.txt").read_text() == "hello"


def test_a_folder_that_cannot_be_made(tmp_path):
    """A file stands in the way."""
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"out: cannot be made: Not a directory"):
        run(tmp_path / "file" / "out")


class Border(InProcess):
    """Stops in some way before the task of a number; NUM_TASKS is behind the last one."""

    def __init__(self, number: int, stop: Callable[[], None]):
        self._left, self._stop = number, stop

    def run(self, folder: Path, phase: str, numbers: list[int]) -> Iterator[int]:
        for number in [*numbers, NUM_TASKS]:
            if number == self._left:
                self._stop()
            if number < NUM_TASKS:
                yield from super().run(folder, phase, [number])


@pytest.fixture
def squares(tmp_path, monkeypatch) -> Callable[..., StationResult]:
    """A station of four tasks, each of which writes down elsewhere that it was done."""

    def square(task: dict[str, int], number: int, folder: Path) -> dict[str, Any]:
        with open(tmp_path / "log", "a", encoding="utf-8") as log:
            log.write(f"{number}\n")
        with tasks_module.replacing(folder / f"part-{number}.txt") as path:
            path.write_text(str(task["value"] ** 2))
        return {"square": task["value"] ** 2}

    monkeypatch.setattr(tasks_module, "_find_function", lambda name: square)

    def run_squares(out: Path, runner: Any = None, factor: int = 1) -> StationResult:
        def build(folder: Path) -> dict[str, Any]:
            tasks = [{"value": factor * number} for number in range(NUM_TASKS)]
            reports = run_tasks(folder, "square", square, tasks, runner=runner or InProcess(), progress=NoProgress())
            return {"sum": sum(report["square"] for report in reports)}

        return run_station("squares", out, inputs=[], settings={"factor": factor}, build=build, resumable=True)

    return run_squares


def done_tasks(folder: Path) -> list[int]:
    """Tasks in the order in which they were done, every time."""
    log = folder / "log"
    return [int(line) for line in log.read_text().split()] if log.exists() else []


def throw(number: int) -> Callable[[], None]:
    def stop() -> None:
        raise OSError(number, os.strerror(number))

    return stop


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_a_fork(work: Callable[[], object]) -> int:
    """Do something in a child of this process; how it ended."""
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.ESTALE, errno.EDQUOT])
@pytest.mark.parametrize("border", range(NUM_TASKS + 1))
def test_faults_of_a_disk_lose_no_task(squares, tmp_path, border, number):
    """At every border between tasks: what was done is done, and the bytes are those of an undisturbed run."""
    squares(tmp_path / "truth")
    (tmp_path / "log").unlink()
    with pytest.raises((OSError, UserError)) as caught:
        squares(tmp_path / "out", Border(border, throw(number)))
    if number in (errno.ENOSPC, errno.EDQUOT):
        assert "the disk is full" in str(caught.value)
        assert "what is done is kept: run the same command again" in str(caught.value)
    else:
        assert caught.value.errno == number
    squares(tmp_path / "out")
    assert done_tasks(tmp_path) == list(range(NUM_TASKS))
    assert all_bytes(tmp_path / "out") == all_bytes(tmp_path / "truth")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "out", "truth"]


def test_kill_9_loses_no_task(squares, tmp_path):
    """One process after another is killed, each a task further; the next has the dead one's lock at once."""
    squares(tmp_path / "truth")
    (tmp_path / "log").unlink()
    for border in range(NUM_TASKS + 1):
        assert in_a_fork(lambda border=border: squares(tmp_path / "out", Border(border, kill))) == -signal.SIGKILL
        assert done_tasks(tmp_path) == list(range(border))
        assert (tmp_path / "out.lock").exists()
    squares(tmp_path / "out")
    assert done_tasks(tmp_path) == list(range(NUM_TASKS))
    assert all_bytes(tmp_path / "out") == all_bytes(tmp_path / "truth")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "out", "truth"]


MOVES = ("os.replace", "list_outputs", "write_text", "_replace_folder", "_complete", "shutil.rmtree")
"""What the driver does to its folder behind the last task."""


@pytest.mark.parametrize("stop", [throw(errno.EIO), throw(errno.ENOSPC), kill], ids=["EIO", "ENOSPC", "kill"])
@pytest.mark.parametrize("is_first", [True, False], ids=["new", "over an older one"])
def test_nothing_is_lost_while_a_folder_is_completed(squares, tmp_path, monkeypatch, stop, is_first):
    """Stopped at each move between the last task and the end: no task is done again."""
    squares(tmp_path / "truth")
    for move in MOVES:
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        (tmp_path / "log").unlink()
        if not is_first:
            squares(tmp_path / "out", factor=3)
            (tmp_path / "log").unlink()

        def stopped(move: str = move) -> None:
            with monkeypatch.context() as patch:
                own, _, name = move.rpartition(".")
                holder = getattr(module, own) if own else module
                real = getattr(holder, name)

                def first_work(*args: Any, **options: Any) -> Any:
                    if any(tmp_path.glob(f"out*/{WORK_FOLDER}/square/{NUM_TASKS - 1:05d}.json")):
                        stop()
                    return real(*args, **options)

                patch.setattr(holder, name, first_work)
                squares(tmp_path / "out")

        if stop is kill:
            assert in_a_fork(stopped) == -signal.SIGKILL, move
        else:
            with contextlib.suppress(OSError, UserError):
                stopped()
        squares(tmp_path / "out")
        assert done_tasks(tmp_path) == list(range(NUM_TASKS)), move
        assert all_bytes(tmp_path / "out") == all_bytes(tmp_path / "truth"), move
        assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "out", "truth"], move


def test_a_station_of_documents_goes_on(tmp_path, monkeypatch):
    """The real thing: an EIO in the fourth of six tasks of `clean`, whose half-written files do not disturb."""
    monkeypatch.setattr("megalite.corpus.shards.SMALLEST_SHARD", 4_000)
    for number in range(6):
        write_json_lines(tmp_path / "raw" / f"{number}.jsonl", prose(20, seed=number))
    corpus, calls = corpus_of(tmp_path / "raw"), []
    clean(corpus, tmp_path / "truth", CleanConfig())
    from megalite.corpus.stations import clean as cleaning

    real = cleaning.clean_texts

    def fails_once(*given):
        calls.append(1)
        if len(calls) == 4:
            raise OSError(errno.EIO, "Input/output error")
        return real(*given)

    monkeypatch.setattr(cleaning, "clean_texts", fails_once)
    with pytest.raises(OSError, match="Input/output error"):
        clean(corpus, tmp_path / "out", CleanConfig())
    clean(corpus, tmp_path / "out", CleanConfig())
    assert len(calls) == 7
    assert all_bytes(tmp_path / "out") == all_bytes(tmp_path / "truth")


def test_a_report_that_a_disk_broke_is_no_report(squares, tmp_path):
    """Its task is done again, whatever became of the file."""
    squares(tmp_path / "truth")
    with pytest.raises(OSError, match="Input/output error"):
        squares(tmp_path / "out", Border(NUM_TASKS, throw(errno.EIO)))
    (tmp_path / "log").unlink()
    work = tmp_path / "out.partial" / WORK_FOLDER / "square"
    (work / "00000.json").write_bytes(b"")
    (work / "00001.json").write_bytes(b"\xff\0[[[")
    (work / "00003.json").write_bytes((work / "00003.json").read_bytes().replace(b'"square": 9', b'"square": 8'))
    squares(tmp_path / "out")
    assert done_tasks(tmp_path) == [0, 1, 3]
    assert all_bytes(tmp_path / "out") == all_bytes(tmp_path / "truth")


def test_two_at_a_time_in_one_folder(squares, tmp_path):
    """The second is refused while the first works, touches nothing, and finds all done afterwards."""
    refused = []

    def second() -> None:
        before = all_bytes(tmp_path / "out.partial")
        with pytest.raises(UserError, match="is at work here; let it end, or stop it first"):
            squares(tmp_path / "out", factor=2)
        assert all_bytes(tmp_path / "out.partial") == before
        refused.append(1)

    for border in range(NUM_TASKS + 1):
        squares(tmp_path / f"out{border}")
    squares(tmp_path / "out", Border(2, second))
    assert refused == [1]
    assert squares(tmp_path / "out").reused


def test_both_wait_for_nothing_when_the_work_is_done(squares, tmp_path):
    """A lock that another process holds on a finished folder does not keep its readers away."""
    squares(tmp_path / "out")
    with module.Lease(tmp_path / "out.lock", tmp_path / "out"):
        assert squares(tmp_path / "out").reused


def test_who_has_lost_the_folder_ends(squares, tmp_path):
    """Another process has taken over, since this one slept: it ends at the next task, and removes nothing."""

    def taken_over() -> None:
        (tmp_path / "out.partial" / WORK_FOLDER / OWNER_FILE).write_text("another")

    with pytest.raises(UserError, match="another process has taken over here"):
        squares(tmp_path / "out", Border(2, taken_over))
    assert done_tasks(tmp_path) == [0, 1, 2]
    squares(tmp_path / "out")
    assert done_tasks(tmp_path) == [0, 1, 2, 3]


def test_a_worker_of_a_former_owner_reports_nothing(squares, tmp_path, monkeypatch):
    """A task that was under way when the folder got another owner is done again by that one's workers."""
    find = tasks_module._find_function

    def slow(task, number, folder):
        (folder / WORK_FOLDER / OWNER_FILE).write_text("another")
        return find("")(task, number, folder)

    with pytest.raises(KeyboardInterrupt):
        squares(tmp_path / "out", Border(0, lambda: (_ for _ in ()).throw(KeyboardInterrupt)))
    monkeypatch.setattr(tasks_module, "_find_function", lambda name: slow)
    with pytest.raises(UserError, match="another process has taken over"):
        tasks_module.perform(tmp_path / "out.partial", "square", 1)
    assert tasks_module.missing_tasks(tmp_path / "out.partial", "square") == list(range(NUM_TASKS))


@pytest.mark.parametrize("names", [("in", "n\udce9w"), ("caf\udce9", "out")])
def test_names_that_are_not_utf8_are_refused(tmp_path, names):
    """Of what is read and of what is made: before anything is written, and shown as bytes."""
    inputs = [(tmp_path / names[0], "a hash")]
    with pytest.raises(DataError, match=r"\\xe9w?: a name that is not UTF-8, which a manifest cannot hold; rename it"):
        run_station("demo", tmp_path / names[1], inputs=inputs, settings={}, build=lambda folder: {})
    assert not list(tmp_path.iterdir())
