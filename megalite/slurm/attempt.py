"""One attempt to train: an srun step of all ranks, watched until it ends or has to be ended.

start -> every half second: has it ended? is it asked to stop? does every rank live and go on?
      -> ended by itself                       `outcome.judge`
      -> a rank is frozen, or nothing moves    stacks of all ranks, then the step is cancelled
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from megalite.slurm.cluster import ClusterConfig, ContainerConfig
from megalite.slurm.controller import Controller
from megalite.slurm.folder import LaunchFolder
from megalite.slurm.hosts import Hosts, write_hostfile
from megalite.slurm.outcome import Next, Outcome, judge, read_errors
from megalite.slurm.watch import Patience, find_trouble
from megalite.train.heartbeat import clock_of, read_beats
from megalite.train.local import RANK_ENVIRONMENT
from megalite.train.run_folder import LOGS
from megalite.train.worker import ATTEMPT_VARIABLE

SECONDS_BETWEEN_LOOKS = 0.5

SECONDS_FOR_STACKS = 2.0

SECONDS_TO_END = 10.0
"""What a cancelled step gets before the attempt is left as it is: its node may never answer again."""

FIRST_PORT, NUM_PORTS = 20000, 20000

WAIT_SECONDS = 60
"""After the first rank's end the others have so long; one that ended early would otherwise keep the step for ever."""


@dataclass(frozen=True)
class Job:
    """What a supervisor knows of the job it runs in."""

    number: str
    folder: LaunchFolder
    cluster: ClusterConfig
    ranks_per_node: int
    patience: Patience


class Attempt:
    """An attempt on some hosts.

    Args:
        job: in which it runs.
        number: of the attempt, higher than all before.
        hosts: nodes in the order of their ranks.
        controller: the cluster's controller.
    """

    def __init__(self, job: Job, number: int, hosts: Hosts, controller: Controller):
        self.number = number
        self.hosts = hosts
        self._job, self._controller = job, controller
        self.folder = job.folder.attempt(number)
        self.world_size = len(hosts.used) * job.ranks_per_node
        (self.folder / "beats").mkdir(parents=True, exist_ok=True)
        write_hostfile(self.folder / "hosts", hosts, job.ranks_per_node)
        for path in (job.folder.run_dir / LOGS).glob("error-*.json"):
            path.unlink(missing_ok=True)  # of former attempts
        self._stderr = self.folder / "srun.log"
        self._started = clock_of(self.folder)
        with open(self._stderr, "wb") as log:
            self._process = subprocess.Popen(
                self.command(), env=self.environment(), stderr=log, stdin=subprocess.DEVNULL
            )

    @property
    def step_name(self) -> str:
        """Name of the srun step."""
        return f"attempt-{self.number}"

    def command(self) -> list[str]:
        """The srun command."""
        cluster = self._job.cluster
        rank = [sys.executable, "-m", "megalite.slurm.rank", str(self._job.folder.run_dir)]
        return [
            "srun",
            f"--job-name={self.step_name}",
            f"--ntasks={self.world_size}",
            f"--nodes={len(self.hosts.used)}",
            "--distribution=arbitrary",
            "--overlap",  # a former attempt's step may still be held up by a node that is gone
            "--kill-on-bad-exit=1",
            f"--wait={WAIT_SECONDS}",
            "--export=ALL",
            f"--output={self.folder}/rank-%t.log",
            f"--error={self.folder}/rank-%t.log",
            *(_pyxis_options(cluster.container) if cluster.container else ()),
            *(_in_container(cluster.container, rank) if cluster.container else rank),
        ]

    def environment(self) -> dict[str, str]:
        """Where ranks meet, and which attempt they are."""
        port = FIRST_PORT + (int(self._job.number) * 31 + self.number) % NUM_PORTS
        return {
            **RANK_ENVIRONMENT,
            **os.environ,
            "SLURM_HOSTFILE": str(self.folder / "hosts"),
            "MASTER_ADDR": self.hosts.used[0],
            "MASTER_PORT": str(port),
            ATTEMPT_VARIABLE: str(self.number),
        }

    def run(self, pending_signal: Callable[[], int | None]) -> Outcome:
        """Watch until the end.

        Args:
            pending_signal: a signal that ranks should get, once; None for none.
        """
        while self._process.poll() is None:
            number = pending_signal()
            if number is not None:
                self._process.send_signal(number)  # srun hands it on to every rank
            trouble = find_trouble(
                read_beats(self.folder / "beats"),
                self.world_size,
                started=self._started,
                now=clock_of(self.folder),
                patience=self._job.patience,
            )
            if trouble is not None:
                self._end()
                nodes = tuple(dict.fromkeys(self.node_of(rank) for rank in trouble.ranks))
                ranks = ", ".join(f"rank {rank} on {self.node_of(rank)}" for rank in trouble.ranks[:8])
                return Outcome(Next.RESTART, f"{ranks}: {trouble.why}", nodes=nodes if len(nodes) == 1 else ())
            time.sleep(SECONDS_BETWEEN_LOOKS)
        words = self._stderr.read_text(encoding="utf-8", errors="replace")
        return judge(self._process.returncode, words, read_errors(self._job.folder.run_dir / LOGS))

    def node_of(self, rank: int) -> str:
        """The node of a rank."""
        return self.hosts.used[rank // self._job.ranks_per_node]

    def last_step(self) -> int:
        """The last step that a rank has been in."""
        return max((beat.step for beat in read_beats(self.folder / "beats").values()), default=0)

    def _end(self) -> None:
        """Ask all ranks for their stacks, then cancel the step."""
        step = self._controller.step_of(self._job.number, self.step_name)
        if step is not None:
            self._controller.signal_step(step, "USR2")
            time.sleep(SECONDS_FOR_STACKS)
            self._controller.cancel(step)
        try:
            self._process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:  # a node that is cut off keeps its task: the fence keeps it from harm
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()


def _pyxis_options(container: ContainerConfig) -> list[str]:
    if container.runtime != "pyxis":
        return []
    mounts = [f"--container-mounts={','.join(container.mounts)}"] if container.mounts else []
    return [f"--container-image={container.image}", *mounts]


def _in_container(container: ContainerConfig, command: list[str]) -> list[str]:
    if container.runtime != "apptainer":
        return ["python", *command[1:]]  # the image's own
    binds = [option for mount in container.mounts for option in ("--bind", mount)]
    return ["apptainer", "exec", "--nv", *binds, container.image, "python", *command[1:]]
