"""A real Slurm cluster on this machine for the tests that need one: nodes to crash, cables to pull, daemons to stop.

    cluster          fixture: nine nodes, all in service and without jobs when a test begins

It is brought up by the first test that asks for it (about a second) and taken down with the session, also when that is
interrupted or killed. Where it cannot run, its tests are skipped and say why. How it works: `tools/slurm_testbed.sh`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.kit.runs import clean_environment

TESTBED = Path(__file__).parents[2] / "tools" / "slurm_testbed.sh"

NUM_NODES = 9

MAX_ARRAY_SIZE = 20
"""Of the cluster: small, so that a test can go beyond it."""

URGENT = "urgent"
"""A partition whose jobs take the nodes of others, which get GRACE_SECONDS."""

GRACE_SECONDS = 15

BRIEF = "brief"
"""A partition whose jobs get a second."""

EXTRA_LINES = f"""MaxArraySize={MAX_ARRAY_SIZE}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName={URGENT} Nodes=ALL PriorityTier=10
PartitionName={BRIEF} Nodes=ALL GraceTime=1
PartitionName=DEFAULT GraceTime={GRACE_SECONDS}"""

SMALL_DISK_MB = 48

TIMEOUT_SECONDS = 120.0

SECONDS_BETWEEN_LOOKS = 0.1

CRASH_WORDS = ("malloc()", "free()", "corrupted", "Segmentation fault", "stack smashing", "Aborted")
"""Slurm 22.05's slurmd has been seen to end with `malloc(): unaligned tcache chunk detected`, once in some hundred
jobs."""

LIVE_STATES = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED")


@dataclass(frozen=True)
class Cluster:
    """A running cluster."""

    folder: Path
    nodes: tuple[str, ...]

    @property
    def environment(self) -> dict[str, str]:
        """In which Slurm's commands work from this machine, as on a login node."""
        return {
            **clean_environment(),
            "SLURM_TB_DIR": str(self.folder),
            "TB_DISK": str(SMALL_DISK_MB),
            "TB_EXTRA": EXTRA_LINES,
            "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
        }

    @property
    def small_disk(self) -> Path:
        """A disk that all nodes see, which is easily filled."""
        return self.folder / "small"

    def testbed(self, *arguments: str | Path, **options) -> subprocess.CompletedProcess:
        """Run the testbed's script; it must succeed."""
        return self._run([TESTBED, *arguments], **options)

    def on(self, node: str, *command: str | Path, check: bool = True, **options) -> subprocess.CompletedProcess:
        """Run a command on a node and capture what it says."""
        return self._run([TESTBED, "exec", node, *command], check=check, **options)

    def start(self, node: str, *command: str | Path, **options) -> subprocess.Popen:
        """Start a command on a node and leave it running; the caller ends it, by `signal`."""
        return subprocess.Popen(
            [str(part) for part in (TESTBED, "exec", node, *command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.environment,
            **options,
        )

    def signal(self, node: str, words: str, number: signal.Signals) -> None:
        """Send a signal to the processes of a node whose command lines hold some words (a regular expression)."""
        self.on(node, "pkill", f"-{number.value}", "-f", words)

    def slurm(self, *command: str | Path) -> str:
        """What one of Slurm's commands prints; it must succeed."""
        return self._run(command).stdout.strip()

    def run(self, *command: str | Path) -> subprocess.CompletedProcess:
        """Run one of Slurm's commands, which may be refused."""
        return self._run(command, check=False)

    def sbatch(self, *arguments: str | Path) -> str:
        """Submit a job; returns its number."""
        return self.slurm("sbatch", "--parsable", *arguments).split(";")[0]

    def states(self, **filters: str) -> dict[str, str]:
        """State of every job that Slurm remembers, by number; `filters` are options of squeue, as name="x"."""
        options = [f"--{name}={value}" for name, value in filters.items()]
        lines = self.slurm("squeue", "--noheader", "--array", "--states=all", "--format=%i %T", *options).splitlines()
        return dict(line.split() for line in lines)

    def live_jobs(self, **filters: str) -> list[str]:
        """Jobs that wait or run."""
        return [job for job, state in self.states(**filters).items() if state in LIVE_STATES]

    def node_state(self, node: str) -> str:
        """As in alloc or down*."""
        return self.slurm("sinfo", "--noheader", "--partition=main", f"--nodes={node}", "--format=%t")

    def wait_for_end(self, job: str) -> str:
        """Wait until a job has ended; returns its last state."""
        until(lambda: self.states(jobs=job)[job] not in LIVE_STATES, f"the end of job {job}")
        return self.states(jobs=job)[job]

    def crashes(self) -> list[str]:
        """What daemons of Slurm said when they broke down by themselves, as glibc and the kernel put it."""
        lines = [line for path in self.folder.glob("log/init.*.log") for line in path.read_text().splitlines()]
        return [line for line in lines if any(word in line for word in CRASH_WORDS)]

    def restore(self) -> None:
        """Cancel all jobs and bring all nodes back."""
        self.testbed("boot", "ctl")
        with ThreadPoolExecutor(len(self.nodes)) as pool:
            list(pool.map(partial(self.testbed, "boot"), self.nodes))
        self.testbed("up", str(len(self.nodes)))
        self.slurm("scancel", f"--user={os.getuid()}")
        until(lambda: not self.live_jobs(), "the end of all jobs")

    def _run(self, command, *, check: bool = True, **options) -> subprocess.CompletedProcess:
        options = {"env": self.environment, "timeout": TIMEOUT_SECONDS, **options}
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **options)
        if check and done.returncode:
            raise AssertionError(f"{command}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done


def until(happens: Callable[[], object], what: str, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
    """Wait for something to become true."""
    deadline = time.monotonic() + timeout_seconds
    while not happens():
        assert time.monotonic() < deadline, f"waited {timeout_seconds:.0f} s in vain for {what}"
        time.sleep(SECONDS_BETWEEN_LOOKS)


@pytest.fixture(scope="session")
def cluster_of_session(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The cluster of all tests."""
    check = subprocess.run([TESTBED, "check"], capture_output=True, text=True, timeout=60, check=False)
    if check.returncode:
        pytest.skip(check.stderr.strip())
    # a short path: it names sockets. The cluster also goes down with this process, should that be killed
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    cluster = Cluster(folder, tuple(f"node{number:02d}" for number in range(1, NUM_NODES + 1)))
    try:
        cluster.testbed("up", str(NUM_NODES), env={**cluster.environment, "TB_OWNER": str(os.getpid())})
        request.session.slurm_cluster = cluster  # where tests/slurm/conftest.py finds it
        yield cluster
    finally:
        cluster.testbed("down")
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def cluster(cluster_of_session) -> Iterator[Cluster]:
    """The cluster, in order before and after the test."""
    yield cluster_of_session
    cluster_of_session.restore()
