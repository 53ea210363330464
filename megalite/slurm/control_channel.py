"""The control channel between a supervisor and the agents on its nodes: files in a folder of the job.

    HOME/
      secret               by which agents and ranks know each other; only its owner can read it
      job.json             the job's nodes, and what agents must know of the cluster
      order.json           supervisor: which work is at hand, and whether it goes on         overwritten in place
      work-00003.json      supervisor: what that work is
      reports/NODE.json    agent: a sign of life each second, and what became of its part    overwritten in place
      handover.json        supervisor: watchdogs are to end the job, for it cannot            overwritten in place

Only files are shared, so nothing here needs Slurm's controller: work begins, ends and begins anew while it is away.
What is said again and again has its room from the start, so a full disk silences nobody.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megalite.files import write_atomically
from megalite.train.in_place import clock_of, read_in_place, write_in_place

ORDER_BYTES, REPORT_BYTES, HANDOVER_BYTES = 256, 8192, 8192

LONGEST_WHY = 1000
"""Characters of why a job is handed over."""

SECRET_BYTES = 16


@dataclass(frozen=True)
class JobInfo:
    """What agents must know."""

    nodes: tuple[str, ...]
    """Of the job, in the order in which each finds its neighbours."""
    interface: str | None = None
    """That ranks talk through; None for the one that leads to another node."""
    controller: tuple[str, int] | None = None
    """Where Slurm's controller listens, if that is known."""


@dataclass(frozen=True)
class Workload:
    """Processes that run at the same time on some nodes."""

    command: tuple[str, ...]
    hosts: tuple[str, ...]
    """Nodes in the order of their ranks."""
    processes_per_node: int
    environment: dict[str, str]
    """For all of them, beside who each is."""
    logs: str
    """Folder for `rank-R.log`."""

    @property
    def world_size(self) -> int:
        """How many processes there are."""
        return len(self.hosts) * self.processes_per_node

    def ranks_of(self, node: str) -> range:
        """Ranks that a node runs."""
        if node not in self.hosts:
            return range(0)
        first = self.hosts.index(node) * self.processes_per_node
        return range(first, first + self.processes_per_node)


@dataclass(frozen=True)
class DesiredState:
    """What agents are to do now; each brings its node there."""

    work: int = 0
    """Number of the work at hand; 0 before the first."""
    is_over: bool = False
    """Its processes are to be ended."""
    wants_stacks: bool = False
    """By then, they are to write down where they stand."""
    num_stops: int = 0
    """How often its processes were asked to save and stop."""
    is_closed: bool = False
    """Nothing will follow."""


@dataclass(frozen=True)
class ProcessExit:
    """The end of a process, as its agent saw it."""

    rank: int
    how: int | str
    """Its exit code, negative for a signal; or why it could not be started."""
    time: float
    """By the file server's clock."""


@dataclass(frozen=True)
class AgentReport:
    """What an agent said last."""

    time: float = 0.0
    """When it said so, by the file server's clock; 0 before it has said anything."""
    work: int = 0
    """The work that it has begun."""
    num_running: int = 0
    """Its processes that have not ended."""
    ended: tuple[ProcessExit, ...] = ()
    address: str = ""
    """Path of its node through the switches; empty where Slurm does not say."""
    endpoint: tuple[str, int] | None = None
    """Where it answers other agents; None where it found no address of its node."""
    heard: dict[str, float] = field(default_factory=dict)
    """PeerMonitor that have ever answered, and how many seconds ago they did so last."""
    has_carrier: bool | None = None
    """Whether there is a signal on the cable of its interface; None where the system does not say."""
    sees_controller: bool | None = None
    """Whether the controller's host can be reached; None while there was no reason to try."""


class ControlChannel:
    """Both sides' view of the folder.

    Args:
        home: the folder.
    """

    def __init__(self, home: Path):
        self.home = home

    # The supervisor's side

    def create(self, job_info: JobInfo) -> None:
        """Make the folder, and the files that will be overwritten: agents find them even where a network file system
        remembers for a while that a file was not there."""
        (self.home / "reports").mkdir(parents=True, exist_ok=True)
        secret = os.open(self.home / "secret", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(secret, "w", encoding="utf-8") as file:
            file.write(secrets.token_hex(SECRET_BYTES))
        write_atomically(self.home / "job.json", json.dumps(asdict(job_info)))
        self.write_desired_state(DesiredState())
        self._write_handover({})
        for node in job_info.nodes:
            self._report(node).write_bytes(b" " * REPORT_BYTES)

    def write_work(self, number: int, work: Workload) -> None:
        """Say what a work is, before it is ordered."""
        write_atomically(self._work(number), json.dumps(asdict(work)))

    def write_desired_state(self, order: DesiredState) -> None:
        """Say what is to be done."""
        write_in_place(self.home / "order.json", asdict(order), ORDER_BYTES)

    def reports(self, nodes: Sequence[str]) -> dict[str, AgentReport]:
        """What agents said last."""
        return {node: self.report(node) for node in nodes}

    def hand_over(self, why: str, nodes: Sequence[str]) -> None:
        """Ask watchdogs to end the job, and to keep the next one off some nodes."""
        self._write_handover({"why": why[:LONGEST_WHY], "nodes": list(nodes)})

    def _write_handover(self, content: dict[str, Any]) -> None:
        write_in_place(self.home / "handover.json", content, HANDOVER_BYTES)

    # The agents' side

    def job_info(self) -> JobInfo:
        """What is to be known."""
        plain = json.loads((self.home / "job.json").read_text(encoding="utf-8"))
        controller = tuple(plain["controller"]) if plain["controller"] else None
        return JobInfo(tuple(plain["nodes"]), plain["interface"], controller)

    def desired_state(self) -> DesiredState:
        """What is to be done; nothing where that cannot be read now."""
        said, _ = read_in_place(self.home / "order.json")
        return DesiredState(**said) if said is not None else DesiredState()

    def work(self, number: int) -> Workload:
        """What a work is."""
        plain = json.loads(self._work(number).read_text(encoding="utf-8"))
        return Workload(**{**plain, "command": tuple(plain["command"]), "hosts": tuple(plain["hosts"])})

    def write_report(self, node: str, report: AgentReport) -> None:
        """Give a sign of life; times are written as ages, for clocks of nodes need not agree."""
        plain = asdict(report)
        now = plain.pop("time")
        plain["ended"] = [[each.rank, each.how, round(now - each.time, 2)] for each in report.ended]
        write_in_place(self._report(node), plain, REPORT_BYTES)

    def handover(self) -> dict[str, Any] | None:
        """Why watchdogs are to end the job, and the nodes to keep off; None while they are not."""
        return read_in_place(self.home / "handover.json")[0] or None

    # Both sides'

    def secret(self) -> str:
        """By which agents and ranks know each other."""
        return (self.home / "secret").read_text(encoding="utf-8")

    def clock(self) -> float:
        """The time by the clock of reports."""
        return clock_of(self.home)

    def report(self, node: str) -> AgentReport:
        """What an agent said last."""
        said, written = read_in_place(self._report(node))
        if said is None:
            return AgentReport()
        ended = tuple(ProcessExit(rank, how, written - age) for rank, how, age in said.pop("ended"))
        endpoint = said.pop("endpoint")
        return AgentReport(time=written, ended=ended, endpoint=tuple(endpoint) if endpoint else None, **said)

    def _report(self, node: str) -> Path:
        return self.home / "reports" / f"{node}.json"

    def _work(self, number: int) -> Path:
        return self.home / f"work-{number:05d}.json"
