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
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megalite.slurm.cluster import ClusterConfig, ContainerConfig
from megalite.slurm.controller import Controller
from megalite.slurm.folder import LaunchFolder
from megalite.slurm.hosts import Hosts, write_hostfile
from megalite.slurm.outcome import Next, Outcome, judge, read_errors
from megalite.train.heartbeat import DONE, Beat, read_beats
from megalite.train.in_place import clock_of
from megalite.train.local import RANK_ENVIRONMENT
from megalite.train.run_folder import LOGS
from megalite.train.watch import Patience, find_trouble
from megalite.train.worker import ATTEMPT_VARIABLE

SECONDS_BETWEEN_LOOKS = 0.5

SECONDS_FOR_STACKS = 2.0

SECONDS_TO_END = 3.0
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
    def is_running(self) -> bool:
        """Whether ranks are left."""
        return self._process.poll() is None

    @property
    def step_name(self) -> str:
        """Name of the srun step."""
        return f"attempt-{self.number}"

    def command(self) -> list[str]:
        """The srun command."""
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
            *rank_command(self._job.cluster.container, sys.executable, self._job.folder.run_dir),
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

    def run(self, look: Callable[[Attempt, Mapping[int, Beat]], int | None]) -> Outcome:
        """Watch until the end, or until there is trouble that only an end can mend.

        Args:
            look: is called twice a second with the ranks' last beats; a signal that ranks should get, or None.
        """
        while self.is_running:
            beats = read_beats(self.folder / "beats")
            number = look(self, beats)
            if number is not None:
                self._process.send_signal(number)  # srun hands it on to every rank
            trouble = find_trouble(
                beats,
                self.world_size,
                started=self._started,
                now=clock_of(self.folder),
                patience=self._job.patience,
            )
            if trouble is not None:
                nodes = tuple(dict.fromkeys(self.node_of(rank) for rank in trouble.ranks))
                ranks = ", ".join(f"rank {rank} on {self.node_of(rank)}" for rank in trouble.ranks[:8])
                return Outcome(Next.RESTART, f"{ranks}: {trouble.why}", nodes=nodes if len(nodes) == 1 else ())
            time.sleep(SECONDS_BETWEEN_LOOKS)
        return self._judge()

    def _judge(self) -> Outcome:
        """How it ended by itself."""
        words = self._stderr.read_text(encoding="utf-8", errors="replace")
        errors = read_errors(self._job.folder.run_dir / LOGS, self.number)
        return judge(self._process.returncode, words, errors, self._unfinished())

    def _unfinished(self) -> dict[int, str]:
        """Ranks that have begun and are not done, and their nodes; the first to fall silent comes first."""
        beats = read_beats(self.folder / "beats")
        left = sorted((beat.time, rank) for rank, beat in beats.items() if beat.phase != DONE)
        return {rank: self.node_of(rank) for _, rank in left}

    def node_of(self, rank: int) -> str:
        """The node of a rank."""
        return self.hosts.used[rank // self._job.ranks_per_node]

    def last_step(self) -> int:
        """The last step that a rank has been in."""
        return max((beat.step for beat in read_beats(self.folder / "beats").values()), default=0)

    def end(self) -> None:
        """Ask the ranks that are left for their stacks, then end them."""
        step = self._controller.step_of(self._job.number, self.step_name)
        if step is not None:
            self._signal(step, "USR2")
            time.sleep(SECONDS_FOR_STACKS)
            self._signal(step, "KILL")  # a rank that hangs would take TERM for a request
        try:
            self._process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:  # a node that is cut off keeps its task: the fence keeps it from harm
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()

    def _signal(self, step: str, name: str) -> None:
        """Signal all ranks. Not waited for: scancel talks to every node itself, and waits long for one that is gone."""
        threading.Thread(target=self._controller.signal_step, args=(step, name), daemon=True).start()


def rank_command(container: ContainerConfig | None, python: str, run_dir: Path) -> list[str]:
    """What srun is to run for each rank, after its own options: in a container with the image's own Python."""
    module = ["-m", "megalite.slurm.rank", str(run_dir)]
    if container is None:
        return [python, *module]
    if container.runtime == "pyxis":
        mounts = [f"--container-mounts={','.join(container.mounts)}"] if container.mounts else []
        return [f"--container-image={container.image}", *mounts, "python", *module]
    binds = [option for mount in container.mounts for option in ("--bind", mount)]
    return ["apptainer", "exec", "--nv", *binds, container.image, "python", *module]
