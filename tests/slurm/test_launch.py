"""`megalite launch` on a real Slurm cluster: whatever fails, the run ends with the losses of an undisturbed one.

Most of a fault's time is waiting, so each test has two or three runs at once, on nodes of their own.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from megalite.checkpoint.catalog import latest
from megalite.slurm.controller import Controller
from tests.kit.preloaded import preloaded
from tests.kit.runs import COMMAND, clean_environment, metrics, write_run
from tests.kit.slurm import BRIEF, URGENT, Cluster, until
from tests.slurm.inject.rank_faults import SLOW_RANK_VARIABLE
from tests.slurm.launched import LAYOUT_TOLERANCE, LONGEST_WAIT_SECONDS, NUM_STEPS, PROFILE, SECTIONS, Launched, at_once

LONGEST_TEST_SECONDS = 1500
"""One or two minutes on a free machine."""

SLOW_LINK = "20mbit"

SECONDS_TO_SAVE = 20.0

SECONDS_TO_TWO_SAVES = 60.0
"""A second save in a row that fails ends an attempt; some seconds on a free machine."""

HOSTILE = "no %des $(touch CANARY);'\"ü"
"""Name of a run's folder."""

LISTENS = "0A"
"""A socket's state in /proc/net/tcp."""

LONG_BEAT_SECONDS = 60
"""Where no rank is stopped, but ten of them import at once on a few cores."""

NUM_STEPS_OF_EIGHT = 12
"""Steps of eight ranks on two cores: enough for three checkpoints."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Iterator[Callable[[], Path]]:
    """The same run without a cluster, beside the first ones that have one: its folder, once it has ended."""
    folder = tmp_path_factory.mktemp("undisturbed")
    environment = preloaded({**clean_environment(), **PROFILE["environment"]})
    command = [*COMMAND, "train", str(write_run(folder, **SECTIONS))]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def wait() -> Path:
        assert process.wait(LONGEST_WAIT_SECONDS) == 0, (folder / "log").read_text()
        return folder / "run"

    yield wait
    process.terminate()
    process.wait(LONGEST_WAIT_SECONDS)


@pytest.mark.timeout(LONGEST_TEST_SECONDS)
def test_ranks_and_nodes_fail(tmp_path, cluster, undisturbed):
    """A rank killed, one that ends with code 0 too early, one that raises, one that is stopped, and a whole run cut off
    with its supervisor. Beside it, in a folder with a name for shells and Slurm to stumble over, a rank killed while
    Slurm's controller is away, a slurmd killed, and two of four nodes powered off at once, the supervisor's among
    them."""

    def ranks() -> None:
        run = Launched(
            tmp_path / "ranks",
            cluster,
            ranks_per_node=2,
            spares=0,
            sbatch=["--exclusive", "--exclude=node[01-04,07-09]"],
        )
        run.wait_for_step(12, attempt=1)
        run.strike("a rank killed", lambda: run.signal_rank(1, signal.SIGKILL))
        run.wait_for_step(22, attempt=2)
        run.strike("a rank that exits 0 early", lambda: run.inject(1, "exit"))
        run.wait_for_step(32, attempt=3)
        run.strike("a rank that raises", lambda: run.inject(0, "raise"))
        run.wait_for_step(42, attempt=4)
        run.strike("a rank stopped", lambda: run.signal_rank(0, signal.SIGSTOP))
        run.wait_for_step(52, attempt=5)
        cut_off, stale_job = run.state["nodes"][0], run.state["job"]
        for rank in range(2):
            run.inject(rank, "hold")  # they give signs of life, and go on beside their successors
        run.cut_off("a run cut off with its supervisor", lambda: cluster.testbed("link", cut_off, "down"))
        run.wait_for_step(62, attempt=6)
        run.release()
        assert run.wait_for_end() == "finished", run.log()
        until(lambda: "attempt 6 has started since" in run.rank_log(0, attempt=5), "the stale ranks to give up")
        killed, left, raised, stopped, *_ = run.ends()
        assert "rank 1 on" in killed
        assert "Killed" in killed
        assert "rank 1 on" in left
        assert "ended too early" in left
        assert "rank 0 failed first: ArithmeticError" in raised
        assert "rank 0 on" in stopped
        assert "no heartbeat for" in stopped
        assert "loop.py" in (run.folder.attempt(4) / "stacks-00001.txt").read_text()  # of the rank that waited
        assert run.state["job"] != stale_job
        assert run.state["nodes"] != [cut_off]
        run.assert_quick()
        run.assert_as(undisturbed())

    def nodes() -> None:
        run = Launched(tmp_path / HOSTILE, cluster, spares=2, sbatch=["--exclusive", "--exclude=node[05-09]"])
        run.wait_for_step(5, attempt=1)
        without_rank = run.worker
        cluster.testbed("daemon", "ctl", "stop")
        run.strike("a rank killed while the controller is away", lambda: run.kill_rank_on(without_rank))
        run.wait_for_step(15, attempt=2)
        assert without_rank not in run.state["nodes"]
        cluster.testbed("daemon", "ctl", "start")
        without_slurmd = run.worker
        cluster.slurm("scontrol", "update", f"nodename={without_slurmd}", "state=NoResp")  # until the next ping
        run.wait_for_save(without_slurmd)
        until(lambda: "*" not in cluster.node_state(without_slurmd), "Slurm to see the node again")
        run.inject(0, "hold")  # or the run is over before Slurm notices
        run.strike("a slurmd killed", lambda: cluster.testbed("daemon", without_slurmd, "kill"))
        run.wait_for_step(40, attempt=3)
        cluster.testbed("daemon", without_slurmd, "start")
        until(lambda: cluster.node_state(without_slurmd) == "idle", "the node to be in service")
        run.inject(0, "hold")  # the same
        two = (run.worker, run.batch_host)  # what is left are two nodes for a job that asked for four
        run.strike("two nodes powered off at once", lambda: [cluster.testbed("crash", node) for node in two])
        assert run.wait_for_end() == "finished", run.log()
        killed, lost, done = run.ends()
        assert "Killed" in killed
        assert without_slurmd in lost
        assert done == "all ranks are done"
        assert without_slurmd in run.state["nodes"]
        assert not set(two) & set(run.state["nodes"])
        run.assert_quick()
        run.assert_as(undisturbed())
        assert not list(tmp_path.rglob("CANARY"))

    at_once(ranks, nodes)


@pytest.mark.timeout(LONGEST_TEST_SECONDS)
def test_jobs_and_disks_fail(tmp_path, cluster, undisturbed):
    """The cable of the first job's own node is pulled, which is named although it is the one that complains; the second
    one's other node reboots before Slurm sees it, the next job reaches its time limit. Beside it a node with a slow
    network is left out, the disk is full for a while, and the run's folder is closed by chmod. Bad input that only
    ranks can find ends a third run's chain at once, with the message."""

    def jobs() -> None:
        run = Launched(tmp_path / "jobs", cluster, spares=0, sbatch=["--exclusive", "--exclude=node[04-09]"])
        run.wait_for_step(12, attempt=1)
        cut_off, healthy = run.batch_host, run.worker
        run.strike("the cable of the batch host", lambda: cluster.testbed("link", cut_off, "down"))
        run.wait_for_step(22, attempt=2)
        (blamed,) = (event for event in run.folder.read_events() if event["event"] == "cut_off")
        assert blamed["node"] == cut_off
        assert f"{cut_off} is cut off: no signal on the cable, and {healthy} is well" in run.ends()[0]
        assert healthy in run.state["nodes"]
        assert cluster.states()[run.state["next_job"]] == "PENDING"  # not the first job, which may still be cleaned up
        cluster.testbed("link", cut_off, "up")
        cluster.testbed("boot", cut_off)  # as good as new
        run.strike("a node rebooted fast", lambda: _reboot(cluster, run.worker))
        run.wait_for_step(32, attempt=3)
        job = run.state["job"]
        refused = cluster.run("scontrol", "requeue", job)
        assert "disabled" in refused.stderr  # the next job is there already, and need not wait two minutes
        started = next(event["time"] for event in run.folder.read_events() if event.get("job") == job)
        minutes = math.ceil((time.time() - started + SECONDS_TO_SAVE) / 60)
        cluster.slurm("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")
        run.inject(0, "hold")  # or the run is over before the limit is near
        assert run.wait_for_end() == "finished", run.log()
        handed_on = [event["why"] for event in run.folder.read_events() if event["event"] == "handed_on"]
        assert any("the time limit is near" in why for why in handed_on)
        run.assert_quick()
        run.assert_as(undisturbed())

    def disks() -> None:
        slow = "node05"
        cluster.on(slow, "tc", *f"qdisc add dev eth0 root tbf rate {SLOW_LINK} burst 64kbit latency 400ms".split())
        run = Launched(
            cluster.small_disk / "disks",
            cluster,
            {"slurm": {"check_nodes": True}},
            spares=1,
            sbatch=["--exclusive", "--nodelist=node[04-06]"],
        )
        run.wait_for_step(12, attempt=1)
        filler = cluster.small_disk / "filler"
        run.strike("a full disk", lambda: _fill(filler), within=SECONDS_TO_TWO_SAVES)
        until(lambda: "the disk: " in run.status(), "the run to say what it waits for")
        assert "attempt=2" not in run.log()
        filler.unlink()
        run.wait_for_step(22, attempt=2)
        checkpoints = run.folder.run_dir / "checkpoints"
        run.strike("a folder closed by chmod", lambda: checkpoints.chmod(0o555), within=SECONDS_TO_TWO_SAVES)
        until(
            lambda: f"waiting for the disk: {checkpoints} cannot be written (Permission denied)" in run.log(),
            "the same",
        )
        assert "attempt=3" not in run.log()
        checkpoints.chmod(0o755)
        assert run.wait_for_end() == "finished", run.log()
        (unfit,) = (event for event in run.folder.read_events() if event["event"] == "unfit" and event["node"] == slow)
        assert "MB/s at best with its neighbours" in unfit["why"]
        assert slow not in run.state["nodes"]
        cluster.on(slow, "tc", *["qdisc", "del", "dev", "eth0", "root"])
        full, closed, _ = run.ends()
        assert "the next checkpoint needs" in full
        assert "cannot be written (Permission denied)" in closed
        assert [event["event"] for event in run.folder.read_events()].count("waited_for_disk") == 2
        run.assert_quick()
        run.assert_as(undisturbed())

    def beyond_help() -> None:
        damaged = tmp_path / "beyond" / "run" / "checkpoints" / "step-0000005"
        damaged.mkdir(parents=True)
        (damaged / "manifest.json").write_text("{}")
        run = Launched(
            tmp_path / "beyond",
            cluster,
            {"checkpoint": {"every": 10, "max_failures": 1}},
            sbatch=["--exclusive", "--exclude=node[01-06]"],
        )
        assert run.wait_for_end() == "gave up"
        assert "no checkpoint of this run is whole" in run.state["why"]
        assert len(run.ends()) == 1

    at_once(jobs, disks, beyond_help)


@pytest.mark.timeout(LONGEST_TEST_SECONDS)
def test_three_axes_and_a_person(tmp_path, cluster, undisturbed, monkeypatch):
    """Eight ranks on four nodes, tp 2 x pp 2 x dp 2, in the order of switches, to the end; they listen on their nodes'
    addresses in the cluster's network and on no other. Beside it a person: SAVE; a
    second launch, refused; `stop`; a job that is preempted; scancel; scancel of the next job; and a launch after each
    that goes on. One of that run's ranks is slow, which is said, and its last checkpoint is evaluated. And of two jobs
    Slurm says nearly the same at their end: the preempted one was not cancelled."""
    for name in ("PATH", "SLURM_TB_DIR"):
        monkeypatch.setenv(name, cluster.environment[name])

    def three_axes() -> None:
        sections = {
            "parallel": {"tp": 2, "pp": 2, "dp": 2, "zero_stage": 1},
            "train": {"steps": NUM_STEPS_OF_EIGHT},
            "checkpoint": {"every": NUM_STEPS_OF_EIGHT // 3},
            "slurm": {"check_nodes": True, "beat_seconds": LONG_BEAT_SECONDS},
        }
        run = Launched(tmp_path / "axes", cluster, sections, ranks_per_node=2, spares=1)
        run.wait_for_step(1, attempt=1)
        run.inject(0, "hold")  # or the run is over before all is seen
        nodes = [run.node_of_rank(rank) for rank in range(8)]
        assert nodes == [node for node in run.state["nodes"] for _ in range(2)]
        leaves = [int(node[-2:]) % 2 for node in nodes]
        assert leaves in (sorted(leaves), sorted(leaves, reverse=True)), nodes
        assert len(set(nodes)) == 4
        listening = {address for rank in range(8) for address in _listens_on(run.rank_process(rank))}
        assert len(listening) == 4, listening  # one of each node: gloo's, and on the first one also the store's
        run.release()
        assert run.wait_for_end() == "finished", run.log()
        found, expected = metrics(run.folder.run_dir), metrics(undisturbed())[:NUM_STEPS_OF_EIGHT]
        assert [row["tokens"] for row in found] == [row["tokens"] for row in expected]
        for key in ("loss", "grad_norm"):
            assert [row[key] for row in found] == pytest.approx([row[key] for row in expected], rel=LAYOUT_TOLERANCE)

    def person() -> None:
        run = Launched(
            tmp_path / "person",
            cluster,
            {"slurm": {"probe_seconds": 0.2, "beat_seconds": LONG_BEAT_SECONDS}},
            ranks_per_node=2,
            environment={SLOW_RANK_VARIABLE: "1"},
            evaluation={
                "command": f"{sys.executable} -m megalite checkpoint verify {{checkpoint}} && echo {{step}} in {{run}}",
                "every_steps": NUM_STEPS,
            },
        )
        run.wait_for_step(3, attempt=1)
        (run.folder.run_dir / "SAVE").touch()
        until(lambda: not (run.folder.run_dir / "SAVE").exists(), "the request to save to be seen")
        until(lambda: latest(run.folder.run_dir) is not None, "a checkpoint")
        refused = run.megalite("launch", run.config, "--cluster", run.profile)
        assert refused.returncode == 2
        assert "is live: job" in refused.stderr
        assert run.megalite("launch", "stop", run.folder.run_dir).returncode == 0
        assert run.wait_for_end() == "stopped"
        refused = run.megalite("launch", run.config, "--cluster", run.profile)
        assert (refused.returncode, "asks the run to stop; remove that file" in refused.stderr) == (2, True)
        run.folder.stop.unlink()

        run.launch()
        run.wait_for_step(25, attempt=2)
        until(lambda: ("straggler", 2) in run.events(), "the slow rank's name")
        shown = run.status()
        assert shown.splitlines()[0].endswith(": running")
        assert f"slow: rank 1 on {run.state['nodes'][0]}: " in shown
        run.inject(0, "hold")  # here and below: or the run is over before anyone has done anything
        preempted = run.state["job"]
        node = run.state["nodes"][0]
        cluster.sbatch(
            f"--partition={URGENT}", "--exclusive", f"--nodelist={node}", "--output=/dev/null", "--wrap=sleep 3"
        )
        run.wait_for_step(45, attempt=3)
        run.inject(0, "hold")
        assert run.state["job"] != preempted
        assert "all ranks have stopped as asked" in run.ends()[1]
        run.cluster.slurm("scancel", run.state["job"])
        assert run.wait_for_end() == "cancelled", run.log()

        run.launch()
        run.wait_for_step(60, attempt=4)
        run.inject(0, "hold")
        cluster.slurm("scancel", run.state["next_job"])
        cluster.slurm("scancel", "--batch", "--signal=USR1", run.state["job"])  # as Slurm does before the time limit
        assert run.wait_for_end() == "stopped", run.log()
        assert "was cancelled; launch again to go on" in run.state["why"]
        run.launch()
        assert run.wait_for_end() == "finished", run.log()
        shown = run.megalite("launch", "status", run.folder.run_dir).stdout
        assert f"step {NUM_STEPS} of {NUM_STEPS}" in shown
        assert "attempt 5" in shown
        run.assert_as(undisturbed())
        evaluation = run.folder.evaluations / f"step-{NUM_STEPS}.log"
        asked = f"{NUM_STEPS} in {run.folder.run_dir}"
        until(lambda: evaluation.is_file() and asked in evaluation.read_text(), "the evaluation", LONGEST_WAIT_SECONDS)

    at_once(three_axes, person, lambda: _preempt_and_cancel(tmp_path / "end", cluster))


def _preempt_and_cancel(end: Path, cluster: Cluster) -> None:
    """A preempted job was not cancelled, also when it saves for longer than its time of grace, and Slurm ends it as by
    scancel.

    Args:
        end: a file that will let the jobs end.
    """
    controller = Controller()
    save = f"trap : TERM; until test -e {end}; do sleep 0.2; done"
    options = (f"--partition={BRIEF}", "--no-requeue", "--exclusive", "--output=/dev/null", f"--wrap={save}")
    preempted, cancelled, other = (cluster.sbatch(*options) for _ in range(3))

    def state(job: str) -> str:
        return cluster.states(jobs=job)[job]

    until(lambda: {state(job) for job in (preempted, cancelled, other)} == {"RUNNING"}, "the jobs' start")
    node = cluster.slurm("squeue", "--noheader", f"--jobs={preempted}", "--format=%N")
    urgent = cluster.sbatch(
        f"--partition={URGENT}", "--exclusive", f"--nodelist={node}", "--output=/dev/null", "--wrap=:"
    )
    cluster.slurm("scancel", cancelled)
    until(lambda: state(preempted) == state(cancelled) == "COMPLETING", "Slurm to end both jobs")
    assert [controller.was_cancelled(job) for job in (preempted, cancelled, other)] == [False, True, False]
    end.touch()
    for job in (preempted, cancelled, other, urgent):
        cluster.wait_for_end(job)
    assert [controller.was_cancelled(job) for job in (preempted, cancelled, other)] == [False, True, False]
    assert not controller.was_cancelled("999999")


def _reboot(cluster: Cluster, node: str) -> None:
    cluster.testbed("crash", node)
    cluster.testbed("boot", node, env={**cluster.environment, "TB_NORESUME": "1"})


def _listens_on(process: int) -> set[str]:
    """Addresses on which a process waits for connections, as the kernel writes them."""
    home = Path("/proc") / str(process)
    sockets = set()
    for file in (home / "fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            sockets.add(os.readlink(file))
    tables = [(home / "net" / name).read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table]
    return {line[1].split(":")[0] for line in lines if line[3] == LISTENS and f"socket:[{line[9]}]" in sockets}


def _fill(path: Path) -> None:
    """Take all that a disk has left."""
    with open(path, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            return
