"""Tasks and their runners: every task once, in any place, after any interruption; errors by name; nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megalite.corpus.recipe import CleanConfig
from megalite.corpus.stations.clean import clean
from megalite.errors import EXIT_REQUEUE, DataError
from megalite.progress import NoProgress
from megalite.stations.runners import InProcess, LocalPool
from megalite.stations.tasks import TASKS_FILE, WORK_FOLDER, add_counts, missing_tasks, perform, replacing, run_tasks
from tests.kit.data import all_bytes, corpus_of, prose, write_json_lines

REPOSITORY = Path(__file__).parents[2]


def install(folder: Path, names: list[str]) -> Path:
    """A corpus of one document in each of some files, so that each can be a shard of its own."""
    for name in names:
        write_json_lines(folder / "raw" / name, prose(20, seed=len(name)))
    return folder / "raw"


def small_shards(monkeypatch) -> None:
    """Every file of `install` becomes a shard."""
    monkeypatch.setattr("megalite.corpus.shards.SMALLEST_SHARD", 4_000)


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """The unfinished folder of a cleaning station with six tasks, none of them done."""
    small_shards(monkeypatch)
    corpus = corpus_of(install(tmp_path, [f"{'x' * n}.jsonl" for n in range(1, 7)]))

    class Nowhere:
        def run(self, folder, phase, numbers):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        clean(corpus, tmp_path / "out", CleanConfig(), runner=Nowhere())
    clean(corpus, tmp_path / "truth", CleanConfig())
    return corpus, tmp_path / "out.partial"


def test_each_task_alone_in_any_order(planned, tmp_path):
    """Whoever performs a task needs only the folder and its number; the station then finds all done."""
    corpus, folder = planned
    assert missing_tasks(folder, "clean") == list(range(6))
    for number in (4, 0, 5, 1, 3):
        perform(folder, "clean", number)
    assert missing_tasks(folder, "clean") == [2]

    performed = []

    class Counting(InProcess):
        def run(self, folder, phase, numbers):
            performed.extend(numbers)
            return super().run(folder, phase, numbers)

    clean(corpus, tmp_path / "out", CleanConfig(), runner=Counting())
    assert performed == [2]
    assert all_bytes(tmp_path / "out") == all_bytes(tmp_path / "truth")
    assert not (tmp_path / "out" / WORK_FOLDER).exists()


def test_workers_where_temporary_files_have_a_long_name(planned, tmp_path, monkeypatch):
    """A socket there would have a longer name than the kernel takes; the workers are then started another way."""
    corpus, _ = planned
    long = tmp_path / ("long" * 25)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with LocalPool(2) as pool:
        clean(corpus, tmp_path / "out", CleanConfig(), runner=pool)
    assert all_bytes(tmp_path / "out") == all_bytes(tmp_path / "truth")


def test_a_done_task_is_not_done_again(planned):
    """Its files are not touched."""
    _, folder = planned
    perform(folder, "clean", 1)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("part-*")}
    perform(folder, "clean", 1)
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("part-*")}


def test_what_a_killed_task_left_is_cleared(planned, tmp_path):
    """Half a file under a temporary name does not reach the finished folder."""
    corpus, folder = planned
    (folder / ".part-00002.parquet.4242.tmp").write_bytes(b"half")
    clean(corpus, tmp_path / "out", CleanConfig())
    assert all_bytes(tmp_path / "out") == all_bytes(tmp_path / "truth")


def test_other_settings_begin_anew(planned, tmp_path):
    """Reports of other work are not taken for this one's."""
    corpus, folder = planned
    perform(folder, "clean", 0)
    clean(corpus, tmp_path / "out", CleanConfig(min_chars=60))
    clean(corpus, tmp_path / "other", CleanConfig(min_chars=60))
    assert all_bytes(tmp_path / "out") == all_bytes(tmp_path / "other")


def test_a_change_of_the_plan_is_noticed(planned):
    """The list of tasks says which function does them; nothing outside the data tools can be named."""
    _, folder = planned
    path = folder / WORK_FOLDER / "clean" / TASKS_FILE
    header, *rest = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps({**json.loads(header), "function": "os:system"}), *rest]))
    with pytest.raises(AssertionError):
        perform(folder, "clean", 0)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_errors_of_a_task_are_raised_here(tmp_path, monkeypatch, num_workers):
    """With their type and message, and nothing is left that would be taken for a result."""
    small_shards(monkeypatch)
    raw = install(tmp_path, ["a.jsonl", "bb.jsonl", "ccc.jsonl"])
    (raw / "bb.jsonl").write_text("broken\n" + (raw / "bb.jsonl").read_text())
    with LocalPool(num_workers) as runner, pytest.raises(DataError, match=r"bb\.jsonl:1: not a JSON object"):
        clean(corpus_of(raw), tmp_path / "out", CleanConfig(on_error="fail"), runner=runner)
    assert not list(tmp_path.glob("out*"))


def sleep_long(folder: Path, phase: str, number: int) -> None:
    """In the place of `perform`."""
    time.sleep(120)


@pytest.mark.timeout(100)
def test_dead_workers_are_not_waited_for(monkeypatch):
    """Killed just after Ctrl-C, as by the kernel that lacks memory: the pool is left, and no process stays."""
    monkeypatch.setattr("megalite.stations.runners.local.perform", sleep_long)
    pool = LocalPool(2)
    workers: list[int] = []

    def interrupt_and_kill() -> None:
        while pool._pool is None or len(pool._pool._processes) < 2:
            time.sleep(0.1)
        workers.extend(pool._pool._processes)
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)
        for worker in workers:
            os.kill(worker, signal.SIGKILL)

    threading.Thread(target=interrupt_and_kill, daemon=True).start()
    with pytest.raises(KeyboardInterrupt), pool:
        list(pool.run(Path(), "phase", range(8)))
    assert len(workers) == 2


def start(script: str, folder: Path) -> subprocess.Popen:
    """A script as a process in a session of its own."""
    path = folder / "script.py"
    path.write_text(script)
    return subprocess.Popen(
        [sys.executable, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        start_new_session=True,
    )


def test_interrupted_while_workers_load(tmp_path):
    """Ctrl-C to the whole group, as a terminal sends it, early and late: the parent's own word, and no traceback of a
    worker."""
    script = """
import sys
from pathlib import Path
from megalite.stations.runners import LocalPool
import tests.stations.test_tasks as here
import megalite.stations.runners.local as local
if __name__ == "__main__":
    local.perform = here.sleep_shortly
    print("begins", flush=True)
    try:
        with LocalPool(2) as pool:
            list(pool.run(Path(), "phase", range(50)))
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""
    processes = [start(script, tmp_path) for _ in range(3)]
    for process, seconds in zip(processes, (0.2, 0.6, 0.8), strict=True):  # after each other: 0.2, 0.8 and 1.6 s
        began = process.stdout.readline()
        assert began == "begins\n", process.communicate(timeout=60)[1]
        time.sleep(seconds)
        os.killpg(process.pid, signal.SIGINT)
    for process in processes:
        out, error = process.communicate(timeout=60)
        assert (out, error) == ("interrupted\n", "")


def test_stopped_by_the_system(tmp_path):
    """SIGTERM, as a service manager or a batch system sends it: the station says so, and its tasks end in order."""
    script = """
from pathlib import Path
from megalite.cli.data.options import working
import tests.stations.test_tasks as here
import megalite.stations.runners.local as local
if __name__ == "__main__":
    local.perform = here.sleep_shortly
    with working(2) as (_, runner):
        for number in runner.run(Path(), "phase", range(50)):
            print("done", flush=True)
"""
    process = start(script, tmp_path)
    assert process.stdout.readline() == "done\n"
    process.terminate()
    _, error = process.communicate(timeout=60)
    assert process.returncode == EXIT_REQUEUE
    assert error.strip() == "stopped by SIGTERM; run the same command again to go on"


def sleep_shortly(folder: Path, phase: str, number: int) -> None:
    """In the place of `perform`."""
    time.sleep(0.5)


def test_missing_tasks_of_no_phase(tmp_path):
    """A folder without tasks is said to be one."""
    with pytest.raises(DataError, match="no tasks here"):
        missing_tasks(tmp_path, "clean")


def test_counts_add_up():
    """Numbers, and numbers by key."""
    reports = [{"n": 1, "by": {"b": 1}}, {"n": 2, "by": {"a": 5, "b": 2}}]
    assert add_counts(reports, "n") == 3
    assert list(add_counts(reports, "by").items()) == [("a", 5), ("b", 3)]


def test_replacing_shows_the_old_file_or_the_new_one(tmp_path):
    """Also when writing fails in the middle."""
    path = tmp_path / "deep" / "file"
    with replacing(path) as partial:
        partial.write_text("old")

    def fail() -> None:
        with replacing(path) as partial:
            partial.write_text("ne")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]


def test_workers_end_with_their_parent(tmp_path):
    """kill -9 of the parent leaves no process."""
    install(tmp_path, ["a.jsonl", "bb.jsonl", "ccc.jsonl", "dddd.jsonl"])
    script = """
import multiprocessing, sys, time
from pathlib import Path
import megalite.corpus.shards as shards
from megalite.corpus.stations.clean import clean
from megalite.corpus.corpus import Corpus
from megalite.corpus.recipe import CleanConfig, DocumentSource
from megalite.stations.runners import LocalPool
if __name__ == "__main__":
    shards.SMALLEST_SHARD = 4_000
    root = Path(sys.argv[1])
    with LocalPool(2) as runner:
        clean(Corpus([DocumentSource(path=root / "raw")]), root / "out", CleanConfig(), runner=runner)
        print(*[process.pid for process in multiprocessing.active_children()], flush=True)
        time.sleep(60)
"""
    path = tmp_path / "script.py"
    path.write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(
        [sys.executable, str(path), str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        workers = [int(pid) for pid in process.stdout.readline().split()]
        assert workers
        process.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + 20
        while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
    finally:
        process.kill()
        process.wait()


def test_a_ray_cluster_leaves_the_same_bytes(planned, tmp_path, monkeypatch):
    """Two Ray workers, also where another cluster is said to run; a mistake in the data is raised as here."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install ray")
    from megalite.stations.runners.ray import RayCluster

    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")
    corpus, _ = planned
    with RayCluster(num_cpus=2) as runner:
        clean(corpus, tmp_path / "out", CleanConfig(), runner=runner)
        (tmp_path / "raw" / "bad.jsonl").write_text("broken\n")
        with pytest.raises(DataError, match=r"bad\.jsonl:1: not a JSON object"):
            clean(corpus_of(tmp_path / "raw"), tmp_path / "bad", CleanConfig(on_error="fail"), runner=runner)
        time.sleep(1)  # a task that was still under way would have written by now
        assert not list(tmp_path.glob("bad*"))
    assert all_bytes(tmp_path / "out") == all_bytes(tmp_path / "truth")


def test_run_tasks_reports_progress_of_done_ones(planned):
    """An interrupted station's bar begins where it was."""
    _, folder = planned
    perform(folder, "clean", 0)
    told = []

    class Listening(NoProgress):
        def advance(self, amount: float) -> None:
            told.append(amount)

    lines = (folder / WORK_FOLDER / "clean" / TASKS_FILE).read_text().splitlines()[1:]
    from megalite.corpus.stations.clean import clean_shard

    run_tasks(folder, "clean", clean_shard, list(map(json.loads, lines)), runner=InProcess(), progress=Listening())
    assert len(told) == 6
    assert all(amount > 0 for amount in told)
