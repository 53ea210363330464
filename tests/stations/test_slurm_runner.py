"""Workers that share a folder with their driver, and what a Slurm driver refuses: all that needs no cluster. What needs
one is in `tests/slurm/`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from megalite.corpus.recipe import CleanConfig
from megalite.corpus.stations.clean import clean
from megalite.errors import EXIT_REQUEUE, DataError, UnavailableError, UserError
from megalite.slurm_quoting import check_options
from megalite.stations.runners import worker as worker_module
from megalite.stations.runners.signals import stopping_in_order
from megalite.stations.runners.slurm import SlurmArray
from megalite.stations.runners.slurm_queue import OWNED, Element
from megalite.stations.runners.task_queue import TaskFailure, TaskQueue, WorkerHeartbeat
from megalite.stations.runners.worker import serve
from megalite.stations.tasks import missing_tasks
from tests.kit.data import all_bytes, corpus_of, prose, write_json_lines

NUM_TASKS = 6


@pytest.fixture
def queue(tmp_path) -> TaskQueue:
    """A queue in which nothing is asked for."""
    queue = TaskQueue(tmp_path / "home")
    queue.clear()
    return queue


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """A corpus of six shards."""
    monkeypatch.setattr("megalite.corpus.shards.SMALLEST_SHARD", 4_000)
    for number in range(NUM_TASKS):
        write_json_lines(tmp_path / "raw" / f"{number}.jsonl", prose(20, seed=number))
    return corpus_of(tmp_path / "raw")


class Crew:
    """A runner whose workers are threads of this process."""

    def __init__(self, queue: TaskQueue, num_workers: int):
        self._queue = queue
        self._names = [f"worker{number}.0" for number in range(num_workers)]

    def run(self, folder, phase, numbers):
        self._queue.post(folder, phase, numbers)
        threads = [threading.Thread(target=serve, args=(self._queue._home, name)) for name in self._names]
        for thread in threads:
            thread.start()
        left = set(numbers)
        while left:
            done = left - set(missing_tasks(folder, phase))
            left -= done
            yield from done
            time.sleep(0.01)
        self._queue.withdraw(closed=True)
        for thread in threads:
            thread.join()


def test_workers_leave_the_same_bytes(queue, corpus, tmp_path, monkeypatch):
    """Three workers share the tasks: each is done once, and the result is that of one process."""
    done = []
    perform = worker_module.perform
    monkeypatch.setattr(worker_module, "perform", lambda *task: (done.append(task[2]), perform(*task)))
    clean(corpus, tmp_path / "out", CleanConfig(), runner=Crew(queue, 3))
    clean(corpus, tmp_path / "truth", CleanConfig())
    assert all_bytes(tmp_path / "out") == all_bytes(tmp_path / "truth")
    assert sorted(done) == list(range(NUM_TASKS))


def test_a_task_has_one_claimant(queue, tmp_path):
    """Sixteen threads want 200 tasks, all in the same order: every task goes to exactly one of them."""
    queue.post(tmp_path, "phase", range(200))
    state = queue.state()
    mine: list[list[int]] = [[] for _ in range(16)]
    start = threading.Barrier(len(mine))

    def grab(index: int) -> None:
        start.wait()
        mine[index] += [number for number in queue.tasks(state) if queue.claim(state, number, f"{index}.0")]

    threads = [threading.Thread(target=grab, args=(index,)) for index in range(len(mine))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(number for numbers in mine for number in numbers) == Counter(range(200))
    assert queue.claims(range(200)) == {number: f"{index}.0" for index in range(len(mine)) for number in mine[index]}
    assert queue.claims([7, 300]).keys() == {7}


def test_a_task_offered_again_is_done_by_another(queue, tmp_path, monkeypatch):
    """Also by a worker that has found nothing left before."""
    done = []
    monkeypatch.setattr(worker_module, "perform", lambda folder, phase, number: done.append(number))
    queue.post(tmp_path, "phase", [3, 4])
    assert queue.claim(queue.state(), 4, "dead.0")
    thread = threading.Thread(target=serve, args=(tmp_path / "home", "living.0"))
    thread.start()
    time.sleep(0.5)
    assert done == [3]
    queue.offer_again(4)
    deadline = time.monotonic() + 20
    while done != [3, 4] and time.monotonic() < deadline:
        time.sleep(0.01)
    queue.withdraw(closed=True)
    thread.join()
    assert done == [3, 4]
    assert queue.heartbeat("living.0").host == os.uname().nodename


def test_mistakes_and_faults_are_told_apart(queue, tmp_path, monkeypatch):
    """A mistake of the user's keeps its message, and the worker goes on; a fault keeps its traceback and ends it."""
    errors = {0: DataError("bad line"), 1: UserError("no such model"), 2: OSError(28, "No space left on device")}

    def perform(folder: Path, phase: str, number: int) -> None:
        raise errors[number]

    monkeypatch.setattr(worker_module, "perform", perform)
    queue.post(tmp_path, "phase", [0, 1])
    queue.withdraw()
    queue.post(tmp_path, "phase", [0, 1, 2])
    for number in (0, 1):
        worker_module._do(queue, queue.state(), number, "w.0")
    with pytest.raises(OSError, match="No space left"):
        worker_module._do(queue, queue.state(), 2, "w.0")
    found = queue.failures()
    assert found[:2] == [TaskFailure(0, "data", "bad line", "w.0"), TaskFailure(1, "user", "no such model", "w.0")]
    assert found[2].kind == "disk full"
    assert "Traceback" in found[2].message
    assert queue.failures() == []


def test_a_worker_leaves_when_nothing_is_asked_for(queue, tmp_path, monkeypatch):
    """After a while; and at once when its queue is gone."""
    monkeypatch.setattr(worker_module, "IDLE_SECONDS", 0.3)
    began = time.monotonic()
    serve(tmp_path / "home", "idle.0")
    assert time.monotonic() - began >= 0.3
    monkeypatch.setattr(worker_module, "IDLE_SECONDS", 60.0)
    serve(tmp_path / "nowhere", "lonely.0")


def test_signs_of_life(queue):
    """The last one is seen; none of a worker that never gave any."""
    assert queue.heartbeat("w.0") is None
    for beat in range(2):
        queue.beat("w.0", WorkerHeartbeat("node", "log", beat))
    assert queue.heartbeat("w.0").beat == 1


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("partition=cpu", "expected one option of sbatch"),
        ("--array=0-3", "--array is set by megalite"),
        ("-Jname", "is set by megalite"),
        ("--wrap=true", "--wrap is set by megalite"),
        ("--out=x", "--out is set by megalite"),
        ("--exclusive --mem=1G", "expected one option of sbatch a string"),
        ("-p cpu", "expected one option of sbatch a string"),
        ("--comment=a\nb", "no line of text can hold"),
    ],
)
def test_options_that_cannot_be(option, message):
    """Found before anything is submitted."""
    with pytest.raises(UserError, match=message):
        check_options(["--time=1:00:00", option], OWNED, "--sbatch")


def test_options_that_can_be():
    """Long and short ones."""
    check_options(["--time=1:00:00", "-pcpu", "--exclusive", "--account=a", "--comment=a b"], OWNED)


def test_waiting_for_ever():
    """Slurm's words for it, and those for waiting."""
    for reason in ("PartitionTimeLimit", "QOSMaxMemoryPerJob", "DependencyNeverSatisfied"):
        assert Element("1_0", "PENDING", "", reason).waits_for_ever
    for reason in ("Resources", "Priority", "Dependency", "None", "JobHeldUser"):
        assert not Element("1_0", "PENDING", "", reason).waits_for_ever
    assert not Element("1_0", "RUNNING", "node01", "None").waits_for_ever


def test_without_slurm(tmp_path, monkeypatch):
    """Says what to do, and makes no folder."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnavailableError, match="no sbatch here; run this on a login node of a Slurm cluster, or use"):
        SlurmArray(4, tmp_path / "slurm")
    assert list(tmp_path.iterdir()) == []


def test_slurm_without_a_cluster(tmp_path, monkeypatch):
    """Its commands are installed, and there is nothing behind them: exit code 2."""
    for name in ("sbatch", "squeue"):
        path = tmp_path / name
        path.write_text("#!/bin/sh\necho 'fatal: Could not establish a configuration source' >&2\nexit 1\n")
        path.chmod(0o755)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({"out": str(tmp_path / "out"), "sources": [{"path": str(tmp_path)}]}))
    done = subprocess.run(
        [sys.executable, "-m", "megalite", "data", "prepare", str(recipe), "--runner", "slurm"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    assert done.returncode == 2
    advice = "run this on a login node of a Slurm cluster"
    assert done.stderr == f"megalite: squeue is here, but finds no cluster; {advice}\n"
    assert not (tmp_path / "out").exists()


def test_a_signal_leaves_blocks_in_order(capfd):
    """SIGTERM becomes an exception with exit code 3, and the handlers are as before afterwards."""
    before = signal.getsignal(signal.SIGTERM)
    left = []

    def wait_for_it() -> None:
        with stopping_in_order():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(10)
            finally:
                left.append("in order")

    with pytest.raises(SystemExit) as caught:
        wait_for_it()
    assert caught.value.code == EXIT_REQUEUE
    assert left == ["in order"]
    assert signal.getsignal(signal.SIGTERM) is before
    assert "stopped by SIGTERM; run the same command again to go on" in capfd.readouterr().err
