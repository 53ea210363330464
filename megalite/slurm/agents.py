"""The supervisor's handle on the agents of its job's nodes: one srun step for all attempts (`agent.py`).

The step outlives nodes (`--no-kill`), and whoever waits for it: srun's own process may die with the batch host, and the
others' agents go on. Which nodes Slurm has taken out of the job is in srun's words, without asking anyone.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from megalite.slurm.cluster import ClusterConfig, ContainerConfig
from megalite.slurm.control_channel import AgentReport, ControlChannel, DesiredState, JobInfo, Workload
from megalite.slurm.controller import Controller
from megalite.slurm.folder import LaunchFolder
from megalite.slurm_quoting import option

STEP_NAME = "agents"

SECONDS_TO_APPEAR = 60.0
"""Of an agent, on a node that is slow to start it; the others begin without it."""

SECONDS_TO_APPEAR_LATE = 10.0
"""The same, when there are enough without it."""

SECONDS_TO_LEAVE = 5.0

SECONDS_TO_END = 6.0
"""What is over gets two seconds for its stacks; a node that does not answer by then is left as it is."""

FRESH_SECONDS = 4.0
"""A report comes each second."""

POLL_SECONDS = 0.1

_LOST_NODES = re.compile(r"srun: error: Node failure on (\S+)")
_LAUNCH = re.compile(r"srun: error: Task launch for \S+ failed on node ([\w.-]+): (.+)")


class Agents:
    """The agents of one job.

    Args:
        folder: of the run.
        job: number of the batch job.
        cluster: its profile.
        controller: of the cluster.
    """

    def __init__(self, folder: LaunchFolder, job: str, cluster: ClusterConfig, controller: Controller):
        self._folder, self._job, self._cluster, self._controller = folder, job, cluster, controller
        self._generation = 0
        self._desired = DesiredState()
        self._process: subprocess.Popen | None = None
        self._gone: set[str] = set()
        """Nodes that were lost, or on which no agent could be started."""
        self._expanded: dict[str, list[str]] = {}
        self._started = 0.0
        self.nodes: tuple[str, ...] = ()
        self.channel = ControlChannel(folder.agents(job, 0))

    def start(self, nodes: Sequence[str]) -> None:
        """Start an agent on each of some nodes, but for those that were lost since an earlier start."""
        if self._process is not None:
            self._gone |= {*self.lost(), *self.not_launched()}
        self._generation += 1
        self.nodes = tuple(node for node in nodes if node not in self._gone)
        self.channel = ControlChannel(self._folder.agents(self._job, self._generation))
        self._desired = DesiredState()
        self.channel.create(JobInfo(self.nodes, self._cluster.network_interface, self._controller.endpoint()))
        # as one task a node sees all of the job's cores: with this variable older versions of srun give it one rank's
        environment = {name: value for name, value in os.environ.items() if name != "SLURM_CPUS_PER_TASK"}
        self._started = time.monotonic()
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                self.command(), env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def command(self) -> list[str]:
        """The srun command."""
        return [
            "srun",
            option("job-name", STEP_NAME),
            option("nodelist", ",".join(self.nodes)),
            option("nodes", len(self.nodes)),
            option("ntasks", len(self.nodes)),
            *("--ntasks-per-node=1", "--overlap", "--cpu-bind=none"),
            *("--no-kill", "--kill-on-bad-exit=0", "--wait=0"),  # one node's end is not the others'
            "--export=ALL",
            *step_options(self._cluster.container),
            *python_command(self._cluster.container, is_step=True),
            *("-m", "megalite.slurm.agent", str(self.channel.home)),
        ]

    @property
    def is_running(self) -> bool:
        """Whether the step goes on, as far as its srun knows."""
        return self._process is not None and self._process.poll() is None

    @property
    def reports(self) -> dict[str, AgentReport]:
        """What the agents said last."""
        return self.channel.reports(self.nodes)

    def lost(self) -> list[str]:
        """Nodes that Slurm has taken out of the job."""
        lists = dict.fromkeys(_LOST_NODES.findall(self.words()))
        return [node for each in lists for node in self._expand(each)]

    def words(self) -> str:
        """What srun has said."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def not_launched(self) -> dict[str, str]:
        """Nodes on which Slurm could not start an agent, and why."""
        return {node: why.strip() for node, why in _LAUNCH.findall(self.words())}

    def gather(self, num_needed: int, *, goes_on: Callable[[], bool]) -> list[str]:
        """Wait for the agents to appear; the nodes whose agents are there, in the job's order.

        Args:
            num_needed: a node that is late is not waited for long once there are so many.
            goes_on: whether to go on waiting.
        """
        while True:
            out = {*self.lost(), *self.not_launched()}
            there = self._fresh([node for node in self.nodes if node not in out])
            starting = [node for node in self.nodes if node not in out and not self.channel.report(node).time]
            waited = time.monotonic() - self._started
            patience = SECONDS_TO_APPEAR_LATE if len(there) >= num_needed else SECONDS_TO_APPEAR
            if not starting or waited > patience or not self.is_running or not goes_on():
                return there
            time.sleep(POLL_SECONDS)

    def begin(self, work: Workload) -> None:
        """Start a work's processes."""
        number = self._desired.work + 1
        self.channel.write_work(number, work)
        self._give(DesiredState(number))

    def ask_to_stop(self) -> None:
        """Ask the processes to save and stop."""
        self._give(replace(self._desired, num_stops=self._desired.num_stops + 1))

    def has_begun(self, report: AgentReport) -> bool:
        """Whether a report is of the work at hand."""
        return report.work == self._desired.work

    def is_done(self, nodes: Sequence[str]) -> bool:
        """Whether no process of the work at hand is left on some nodes; one that does not answer has none."""
        reports = [self.channel.report(node) for node in self._fresh(nodes)]
        return not any(report.num_running or not self.has_begun(report) for report in reports)

    def end(self, nodes: Sequence[str], *, wants_stacks: bool = False) -> None:
        """End the work at hand; wait until none of it is left on some nodes, but not for those that do not answer."""
        self._give(replace(self._desired, is_over=True, wants_stacks=wants_stacks))
        deadline = time.monotonic() + SECONDS_TO_END
        while time.monotonic() < deadline and any(self.channel.report(node).num_running for node in self._fresh(nodes)):
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """Let all agents leave, so that the job ends at once."""
        if self._process is None:
            return
        with suppress(OSError):
            self._give(replace(self._desired, is_over=True, is_closed=True))
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(SECONDS_TO_LEAVE)

    def _fresh(self, nodes: Sequence[str]) -> list[str]:
        """Those of some nodes whose agents have reported lately."""
        now = self.channel.clock()
        return [node for node in nodes if now - self.channel.report(node).time < FRESH_SECONDS]

    def _give(self, order: DesiredState) -> None:
        self._desired = order
        self.channel.write_desired_state(order)

    @property
    def _log(self) -> Path:
        return self.channel.home / "srun.log"

    def _expand(self, names: str) -> list[str]:
        if names not in self._expanded:
            self._expanded[names] = self._controller.expand(names)
        return self._expanded[names]


def step_options(container: ContainerConfig | None) -> list[str]:
    """What srun must be told of a container that it starts itself."""
    if container is None or container.runtime != "pyxis":
        return []
    mounts = [option("container-mounts", ",".join(container.mounts))] if container.mounts else []
    return [option("container-image", container.image), *mounts]


def python_command(container: ContainerConfig | None, *, is_step: bool) -> tuple[str, ...]:
    """How a Python with megalite is started: this one, or a container's own.

    Args:
        is_step: by srun, as an agent; else by an agent, which a container of pyxis' is around already.
    """
    if container is None or (container.runtime == "apptainer" and is_step):
        return (sys.executable,)
    if container.runtime == "pyxis":
        return ("python",)
    binds = (word for mount in container.mounts for word in ("--bind", mount))
    return ("apptainer", "exec", "--nv", *binds, container.image, "python")
