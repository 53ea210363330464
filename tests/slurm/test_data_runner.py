"""The data tools on a real Slurm cluster: the same bytes as in one process, whatever fails in the meantime, and nothing
is done twice but what was lost."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from megalite.corpus.prepare import load_recipe, prepare
from megalite.corpus.recipe import CleanConfig
from megalite.corpus.stations.clean import clean
from megalite.errors import DataError, UserError
from megalite.stations.runners import slurm as runner_module
from megalite.stations.runners.slurm import SlurmArray
from megalite.stations.runners.slurm_queue import SlurmQueue
from tests.kit.data import all_bytes, corpus_of, prose, write_json_lines
from tests.kit.slurm import MAX_ARRAY_SIZE, Cluster, until
from tests.slurm import gated

REPOSITORY = Path(__file__).parents[2]

NUM_TASKS = 6

SECTIONS_OF_ALL = ("out", "sources", "valid_fraction", "tokenizer", "pack")


class Work:
    """A cleaning station with six tasks, its workers behind a gate, and what should come of it."""

    def __init__(self, folder: Path, cluster: Cluster):
        self.folder = folder
        self.cluster = cluster
        self.gate = folder / "gate"
        self.gate.mkdir()
        self.out = folder / "out"
        self.home = folder / "slurm"
        self.command = [sys.executable, gated.__file__, str(self.gate)]
        for number in range(NUM_TASKS):
            write_json_lines(folder / "raw" / f"{number}.jsonl", prose(20, seed=number))
        self.corpus = corpus_of(folder / "raw")

    def array(self, num_workers: int = 2, *options: str) -> SlurmArray:
        """Workers for it."""
        return SlurmArray(num_workers, self.home, options, self.command)

    def run(self, num_workers: int = 2, *options: str, **settings) -> None:
        """Drive the station from here."""
        with self.array(num_workers, *options) as runner:
            clean(self.corpus, self.out, CleanConfig(**settings), runner=runner)

    def hold(self, *numbers: int, phase: str = "clean") -> None:
        """Let these tasks wait when they are begun next."""
        for number in numbers:
            (self.gate / f"hold-{phase}-{number}").write_text("")

    def release(self) -> None:
        """Let all tasks go on."""
        for path in self.gate.glob("hold-*"):
            path.unlink()

    def begun(self) -> list[tuple[int, str]]:
        """Tasks that workers have begun, and who did, in that order."""
        path = self.gate / "begun"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(number), worker) for _, number, worker in map(str.split, lines)]

    def worker_of(self, number: int) -> str:
        """Who begins a task; waits for it. The last one, if it was begun several times."""
        until(lambda: number in dict(self.begun()), f"somebody to begin task {number}")
        return dict(self.begun())[number]

    def sign(self, worker: str) -> dict:
        """A worker's sign of life."""
        return json.loads((self.home / "workers" / f"{worker}.0").read_text())

    def signal(self, worker: str, number: signal.Signals) -> None:
        """Send a signal to a worker's process, on its node."""
        self.cluster.signal(self.sign(worker)["host"], f"name {worker}", number)

    def check(self, *lost: int) -> None:
        """The result is right, and every task was begun once, those that were lost twice; no worker is left."""
        clean(self.corpus, self.folder / "truth", CleanConfig())
        assert all_bytes(self.out) == all_bytes(self.folder / "truth")
        counts = Counter(number for number, _ in self.begun())
        assert counts == Counter([*range(NUM_TASKS), *lost])
        assert not self.cluster.live_jobs()


@pytest.fixture
def work(tmp_path, cluster, monkeypatch) -> Work:
    """Cleaning to be done, on a machine that knows the cluster."""
    for name in ("PATH", "SLURM_TB_DIR"):
        monkeypatch.setenv(name, cluster.environment[name])
    monkeypatch.setattr("megalite.corpus.shards.SMALLEST_SHARD", gated.SMALLEST_SHARD)
    return Work(tmp_path, cluster)


@contextmanager
def meanwhile(work: Work, action: Callable[[], None]) -> Iterator[None]:
    """Do something beside the block, which needs the main thread, and release all tasks at its end, however it ends."""
    errors = []

    def act() -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)
        finally:
            work.release()

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        if errors:
            raise errors[0]


def everything(folder: Path) -> dict:
    """A recipe with every station that has tasks, and something for each of them to remove."""
    footer = "\nall rights are reserved, whoever reads this line"
    for name, documents in {
        "raw/a": [*prose(60), "short"],
        "raw/b": [*prose(20), *(text + footer for text in prose(60, seed=1)), *(f"{text} it" for text in prose(9))],
        "evaluation": prose(3, seed=1),
        "good": prose(60, seed=2),
        "bad": [text[::-1] for text in prose(60, seed=3)],
    }.items():
        path = write_json_lines(folder / f"{name}.jsonl", documents)
        if path.parent.name == "raw":  # some pages twice
            records = [{"text": text, "url": f"https://{name}/{page % 70}"} for page, text in enumerate(documents)]
            path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return {
        "out": str(folder / "out"),
        "sources": [{"path": str(folder / "raw"), "keep_fields": ["url"]}],
        "valid_fraction": 0.1,
        "url_dedup": {},
        "near_dedup": {},
        "line_dedup": {"min_occurrences": 50},
        "substring_dedup": {},
        "decontaminate": {"paths": [str(folder / "evaluation.jsonl")]},
        "perplexity": {"train_on": [str(folder / "good.jsonl")], "keep_fraction": 0.9},
        "classifier": {"good": [str(folder / "good.jsonl")], "bad": [str(folder / "bad.jsonl")], "keep_fraction": 0.9},
        "tokenizer": {"vocab_size": 420},
        "pack": {"seq_len": 32},
    }


def the_usual(folder: Path) -> dict:
    """The stations that every recipe has, of the same raw files."""
    return {key: value for key, value in everything(folder).items() if key in SECTIONS_OF_ALL}


def station_bytes(folder: Path) -> dict[str, bytes]:
    """Contents of a recipe's folder but the workers' files and the data card, whose title is the folder's name."""
    return {name: content for name, content in all_bytes(folder).items() if not name.startswith(("card.", "slurm/"))}


def test_a_whole_recipe_from_a_node(tmp_path, cluster, monkeypatch):
    """All stations, driven from a node as a user would: the bytes are those of one process, each task is begun once,
    and one array serves the whole recipe."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(everything(tmp_path)))
    (tmp_path / "gate").mkdir()
    megalite = [sys.executable, gated.__file__, tmp_path / "gate"]
    command = f"--slurm-command={' '.join(map(str, megalite))}"
    monkeypatch.setattr("megalite.corpus.shards.SMALLEST_SHARD", gated.SMALLEST_SHARD)
    prepare(load_recipe(recipe, [f"out={tmp_path / 'truth'}"]))
    done = cluster.on(
        *("node01", *megalite, "data", "prepare", recipe),
        *("--runner", "slurm", "--slurm-jobs", "3", command, "--sbatch=--mem=500"),
    )
    assert station_bytes(tmp_path / "out") == station_bytes(tmp_path / "truth")
    begun = Counter(tuple(line.split()[:2]) for line in (tmp_path / "gate" / "begun").read_text().splitlines())
    assert len({phase for phase, _ in begun}) > 10
    assert done.stderr.count("slurm: submitted 3 workers") == 1, done.stderr
    assert "lost" not in done.stderr
    assert not cluster.live_jobs()


def test_a_node_is_powered_off_and_another_cut_off(work):
    """Their tasks are done elsewhere. The worker whose network cable was pulled lives on, and does no harm when it at
    last comes to its task."""
    work.hold(1, 2)

    def disturb() -> None:
        off, cut = (work.sign(work.worker_of(number))["host"] for number in (1, 2))
        work.cluster.testbed("crash", off)
        work.cluster.testbed("link", cut, "down")
        began = time.monotonic()
        until(lambda: len(work.begun()) == NUM_TASKS + 2, "both tasks to be begun again")
        print(f"tasks of two nodes that failed were begun again after {time.monotonic() - began:.1f} s")
        until(work.out.exists, "the station to be done")

    with meanwhile(work, disturb):
        work.run(3, "--exclusive")
    late = next(worker for number, worker in work.begun() if number == 2)
    log = work.home / "logs" / f"{late}.log"
    until(lambda: "FileNotFoundError" in log.read_text(), "the late worker to find its folder gone")
    assert not (work.folder / "out.partial").exists()
    work.check(1, 2)


def test_a_worker_is_killed_and_another_one_hangs(work, monkeypatch, capfd):
    """Slurm tells of the first, its silence of the second."""
    monkeypatch.setattr(runner_module, "SILENCE_SECONDS", 8.0)
    work.hold(1, 4)

    def disturb() -> None:
        killed, stopped = work.worker_of(1), work.worker_of(4)
        work.signal(killed, signal.SIGKILL)
        work.signal(stopped, signal.SIGSTOP)
        until(lambda: len(work.begun()) == NUM_TASKS + 2, "both tasks to be begun again")

    with meanwhile(work, disturb):
        work.run(3)
    work.check(1, 4)
    said = capfd.readouterr().err
    assert "its worker is gone (FAILED)" in said
    assert "its worker is gone (no sign of life)" in said


def test_somebody_cancels_the_workers(work):
    """The driver does not submit them anew against that will; what is done is kept for when it runs again."""
    work.hold(3)

    def cancel() -> None:
        until(lambda: len(work.begun()) == NUM_TASKS and not_held_are_done(work), "all other tasks")
        work.cluster.slurm("scancel", work.worker_of(3).split("_")[0])
        until(lambda: not work.cluster.live_jobs(), "the workers to be gone")  # before the gate opens: one might go on

    with meanwhile(work, cancel), pytest.raises(UserError, match=r"all workers were cancelled \(\d+_0, \d+_1\)"):
        work.run()
    assert not work.cluster.live_jobs()
    work.run()
    work.check(3)


def not_held_are_done(work: Work) -> bool:
    return len(list((work.folder / "out.partial/.work/clean").glob("[0-9]*.json"))) == NUM_TASKS - 1


def test_a_mistake_in_the_data(work):
    """Its message reaches the driver with the place of the worker's output, and nothing is left."""
    (work.folder / "raw" / "3.jsonl").write_text("broken\n" + (work.folder / "raw" / "3.jsonl").read_text())
    with pytest.raises(
        DataError, match=r"3\.jsonl:1: not a JSON object.* on node\d\d, output in \S+/slurm/logs/\d+_\d"
    ):
        work.run(on_error="fail")
    assert not work.cluster.live_jobs()
    assert not list(work.folder.glob("out*"))


def test_a_fault_of_a_worker(work, monkeypatch):
    """A task that fails is tried by another worker; when it fails there as well, its traceback comes here."""
    (work.gate / "fault-clean-2").write_text("once")
    work.run()
    work.check(2)

    monkeypatch.setattr(runner_module, "MAX_LOSSES", 2)
    (work.gate / "fault-clean-2").write_text("always")
    work.out = work.folder / "other"
    with pytest.raises(RuntimeError, match=r"(?s)failed 2 times, .* line \d+, in .*the test lets this task fail"):
        work.run()
    assert not work.cluster.live_jobs()


def test_a_driver_that_is_stopped_or_killed(work):
    """Ctrl-C and SIGTERM cancel the workers. After kill -9 the next driver does, before it submits its own. A second
    driver beside a living one is refused."""
    recipe = work.folder / "recipe.yaml"
    out = work.folder / "prepared"
    recipe.write_text(yaml.safe_dump({**the_usual(work.folder / "some"), "out": str(out)}))
    command = [*work.command, "data", "prepare", str(recipe), "--runner", "slurm", "--slurm-jobs", "2"]
    command += [f"--slurm-command={' '.join(work.command)}"]
    work.home = out / "slurm"

    def start_and_wait() -> subprocess.Popen:
        (work.gate / "begun").unlink(missing_ok=True)
        work.hold(4, 5)
        driver = work.cluster.start("node01", *command, cwd=REPOSITORY)
        assert work.worker_of(4) != work.worker_of(5)
        return driver

    def stop(driver: subprocess.Popen, number: signal.Signals) -> tuple[int, str]:
        work.cluster.signal("node01", "data prepare .*--runner slurm", number)
        said, _ = driver.communicate(timeout=60)
        return driver.returncode, said

    driver = start_and_wait()
    refused = work.cluster.on("node02", *command, check=False, cwd=REPOSITORY)
    assert refused.returncode == 2
    assert "on node01 is at work here; let it end, or stop it first" in refused.stderr
    assert stop(driver, signal.SIGINT)[0] == 130
    assert not work.cluster.live_jobs()

    code, said = stop(start_and_wait(), signal.SIGTERM)
    assert code == 3
    assert "stopped by SIGTERM; run the same command again to go on" in said
    assert not work.cluster.live_jobs()

    stop(start_and_wait(), signal.SIGKILL)
    left = work.cluster.live_jobs()
    assert len(left) == 2
    work.release()
    said = work.cluster.on("node01", *command, cwd=REPOSITORY).stderr
    assert "cancelling 2 workers of an earlier driver that was killed" in said
    assert {work.cluster.states()[job] for job in left} == {"CANCELLED"}
    assert not work.cluster.live_jobs()
    prepare(load_recipe(recipe, [f"out={work.folder / 'truth'}"]))
    assert station_bytes(out) == station_bytes(work.folder / "truth")


def test_the_controller_is_restarted(work, capfd):
    """Workers go on without it; so does the driver, which asks again."""
    work.hold(2)

    def restart() -> None:
        work.worker_of(2)
        work.cluster.testbed("daemon", "ctl", "stop")
        work.release()
        until(lambda: not (work.folder / "out.partial").exists(), "the station to be done")
        work.cluster.testbed("daemon", "ctl", "start")

    with meanwhile(work, restart):
        work.run()
    work.check()
    assert capfd.readouterr().err.count("submitted") == 1


def test_slurm_is_away_when_workers_are_submitted(work, capfd):
    """The submission is repeated until it is taken."""
    work.cluster.testbed("daemon", "ctl", "stop")
    until(lambda: "DOWN" in work.cluster.run("scontrol", "ping").stdout, "the controller to stop")

    def start() -> None:
        time.sleep(5)
        work.cluster.testbed("daemon", "ctl", "start")

    with meanwhile(work, start):
        work.run()
    work.check()
    assert "Unable to contact slurm controller (connect failure); trying again for 600 s" in capfd.readouterr().err


def test_what_slurm_refuses(work):
    """The reason is Slurm's own; exit code 2, no traceback, and the next try finds nothing in its way."""
    recipe = work.folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(the_usual(work.folder / "some")))
    command = [*work.command, "data", "prepare", recipe, "--runner", "slurm", "--sbatch=--partition=nowhere"]
    done = work.cluster.on("node01", *command, check=False, cwd=REPOSITORY)
    assert done.returncode == 2, done.stderr
    assert "megalite: sbatch refused: sbatch: error: invalid partition specified: nowhere" in done.stderr
    assert "Traceback" not in done.stderr
    with pytest.raises(UserError, match="Memory specification can not be satisfied"):
        work.run(2, "--mem=999G")
    with pytest.raises(UserError, match=r"will not start workers as they were asked for \(PartitionConfig\)"):
        work.run(2, "--nodes=99")
    work.run(2)
    work.check()


def test_workers_wait_for_another_job(work):
    """--dependency goes to Slurm. When it can never be met, the driver says so instead of waiting for ever."""
    first = work.cluster.sbatch("--output=/dev/null", "--wrap=sleep 3")
    work.run(2, f"--dependency=afterok:{first}")
    assert work.cluster.states(jobs=first)[first] == "COMPLETED"
    work.check()

    failed = work.cluster.sbatch("--output=/dev/null", "--wrap=exit 1")
    work.cluster.wait_for_end(failed)
    work.out = work.folder / "other"
    with pytest.raises(UserError, match="all workers were cancelled"):
        work.run(2, f"--dependency=afterok:{failed}")


def test_more_workers_than_an_array_may_have(cluster, work):
    """Several arrays; all of them are counted, and cancelled by their name."""
    queue = SlurmQueue("many", print)
    logs = work.folder / "logs"
    logs.mkdir()
    size = MAX_ARRAY_SIZE + 2
    jobs = queue.submit(size, "sleep 600", options=["--hold"], logs=logs)
    assert len(jobs) == 2
    assert len(queue.elements()) == size
    assert queue.cancel_all(30)
    assert {element.state for element in queue.elements().values()} == {"CANCELLED"}


def test_a_worker_of_several_processes(work):
    """As many as --cpus-per-task says."""
    work.hold(0, 1)

    def both_are_held() -> None:
        assert work.worker_of(0) == work.worker_of(1)

    with meanwhile(work, both_are_held):
        work.run(1, "--cpus-per-task=2")
    work.check()


def test_jobs_by_hand(work):
    """launch/data.sbatch on one node, another job after it; and as the driver of an array, which goes when it goes."""
    recipe = work.folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(the_usual(work.folder / "some")))
    out = work.folder / "some" / "out"
    megalite = work.folder / "megalite"
    megalite.write_text(f'#!/bin/sh\nexec {" ".join(work.command)} "$@"\n')
    megalite.chmod(0o755)
    submit = [f"--export=ALL,MEGALITE={megalite}", f"--chdir={work.folder}"]
    script = REPOSITORY / "launch" / "data.sbatch"

    work.hold(5)
    options = ["--runner", "slurm", "--slurm-jobs", "2", f"--slurm-command={megalite}"]
    driver = work.cluster.sbatch(*submit, script, recipe, *options)
    work.worker_of(5)
    assert len(work.cluster.live_jobs()) == 3
    work.cluster.slurm("scancel", driver)
    until(lambda: not work.cluster.live_jobs(), "the driver's workers to be cancelled with it")
    assert "stopped by SIGTERM" in (work.folder / f"megalite-data-{driver}.log").read_text()
    work.release()

    first = work.cluster.sbatch(*submit, "--cpus-per-task=2", script, recipe)
    after = work.cluster.sbatch(
        f"--dependency=afterok:{first}", "--output=/dev/null", f"--wrap=test -f {out}/card.json"
    )
    assert work.cluster.wait_for_end(first) == "COMPLETED"
    assert work.cluster.wait_for_end(after) == "COMPLETED"
