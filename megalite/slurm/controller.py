"""Slurm's commands as the launcher uses them: one method each, in words of what they are for.

Their answers are short lines, never parsed out of tables for people. How a controller that is away is asked again:
`slurm_commands.py`.

The states of a run's nodes are asked on a thread of their own (`NodeStatePoller`). A slurmd that dies leaves the ranks
of its node at work, and their heartbeats go on: nothing in the run can tell. Slurm marks the node (`*`), and takes it
out after SlurmdTimeout (five minutes, commonly), and with it the ranks. Between the mark and that end there is time for
a checkpoint.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from megalite.errors import UserError
from megalite.slurm_commands import PATIENCE_SECONDS, NoAnswer, ask, insist
from megalite.slurm_quoting import option

LIVE_STATES = "PENDING,CONFIGURING,RUNNING,COMPLETING,SUSPENDED,REQUEUED,STOPPED,SIGNALING"

ENDING_STATE = "COMPLETING"

ENDING_FIELDS = "State:32,PreemptTime:32"
"""Fields that tell how a job ends."""

NO_ANSWER_SIGN = "*"
"""In the state of a node that does not answer Slurm."""

BAD_NODE_WORDS = (
    *("boot", "down", "drain", "drng", "fail", "futr", "inval", "maint", "pow", "unk"),
    *(NO_ANSWER_SIGN, "$"),
)
"""Parts of a node's short state (sinfo's %t) that keep ranks off it."""


@dataclass(frozen=True)
class QueuedJob:
    """A job of the run, as Slurm sees it."""

    number: str
    state: str
    reason: str
    """Why it waits."""


class Controller:
    """The controller of this cluster.

    Args:
        notify: told when it does not answer, and is asked again.
        patience_seconds: for how long.

    Raises:
        UnavailableError: there is no Slurm here, or it does not answer.
    """

    def __init__(self, notify: Callable[[str], None] = print, patience_seconds: float = PATIENCE_SECONDS):
        self._notify, self._patience_seconds = notify, patience_seconds

    def submit(self, script: str, *options: str) -> str:
        """sbatch a script; its job's number."""
        return self._ask(["sbatch", "--parsable", *options, script]).split(";")[0].strip()

    def try_submit(self, *arguments: str) -> str | None:
        """sbatch once; None when the controller is away or refuses."""
        with suppress(UserError, NoAnswer):
            return ask(["sbatch", "--parsable", *arguments]).split(";")[0].strip()
        return None

    def live_jobs(self, name: str, states: str = LIVE_STATES) -> list[str]:
        """This user's jobs of a name that wait or run or are being cleaned up, oldest first."""
        options = (option("name", name), option("users", os.getuid()), option("states", states), "--format=%i")
        return sorted(self._ask(["squeue", "--noheader", *options]).split(), key=lambda job: (len(job), job))

    def queue(self, name: str) -> list[QueuedJob]:
        """The same, with what Slurm says of each."""
        options = (option("name", name), option("users", os.getuid()), option("states", LIVE_STATES))
        lines = self._ask(["squeue", "--noheader", *options, "--format=%i|%T|%r"]).splitlines()
        jobs = [QueuedJob(*line.split("|")) for line in lines]
        return sorted(jobs, key=lambda job: (len(job.number), job.number))

    def waiting_jobs(self, name: str) -> list[str]:
        """Those of them that have not begun, oldest first."""
        return self.live_jobs(name, "PENDING")

    def cancel(self, *jobs: str) -> None:
        """scancel jobs or steps, those that have ended included."""
        for job in jobs:
            with suppress(UserError):
                self._ask(["scancel", "--quiet", job])

    def was_cancelled(self, job: str) -> bool:
        """Whether a person ended a job; False for one that Slurm has forgotten. A preempted job that outlives its time
        of grace is ended by Slurm in the same way, but has a time of preemption."""
        state, preempted_at = self._ending(job)
        return state in ("CANCELLED", ENDING_STATE) and preempted_at == "N/A"

    def is_ending(self, job: str) -> bool:
        """Whether Slurm is ending a job, for whatever reason, and has not done so yet."""
        return self._ending(job)[0] == ENDING_STATE

    def _ending(self, job: str) -> tuple[str, str]:
        """A job's state, and when it was preempted."""
        fields = self._fields(
            ["squeue", "--noheader", "--states=all", option("jobs", job), option("Format", ENDING_FIELDS)]
        )
        state, _, preempted_at = fields.partition(" ")
        return state, preempted_at.strip()

    def nodes_of(self, job: str) -> list[str]:
        """Nodes that a job holds now; SLURM_JOB_NODELIST still has those that it lost."""
        return self.expand(self._fields(["squeue", "--noheader", option("jobs", job), "--format=%N"]))

    def expand(self, names: str) -> list[str]:
        """The names in a list as Slurm writes it, as in node[01-03,07]; also while the controller is away."""
        return self._ask(["scontrol", "show", "hostnames", names]).split() if names else []

    def endpoint(self) -> tuple[str, int] | None:
        """Address and port of the controller, if it answers now: whoever reaches them is not cut off."""
        try:
            lines = ask(["scontrol", "show", "config"]).splitlines()
        except (UserError, NoAnswer):
            return None
        settings = {name.strip(): value.strip() for name, _, value in (line.partition("=") for line in lines)}
        host = re.search(r"\(([^)]+)\)|^([\w.-]+)", settings.get("SlurmctldHost[0]", ""))
        port = re.match(r"\d+", settings.get("SlurmctldPort", ""))
        return (host[1] or host[2], int(port[0])) if host and port else None

    def good_nodes(self, nodes: Sequence[str]) -> list[str]:
        """Those of some nodes that Slurm finds in order."""
        if not nodes:
            return []
        states = _node_states(self._ask(_states_command(nodes)))
        return [node for node in nodes if not any(word in states.get(node, "unk") for word in BAD_NODE_WORDS)]

    def states_of(self, nodes: Sequence[str]) -> dict[str, str]:
        """Short states of some nodes, as in alloc* or down, asked once.

        Raises:
            NoAnswer: the controller is away.
            UserError: it refuses to say.
        """
        return _node_states(ask(_states_command(nodes)))

    def exclude_nodes(self, job: str, nodes: Sequence[str]) -> bool:
        """Keep a waiting job off some nodes, if its partition has enough others in order; whether it has."""
        fields = self._fields(["squeue", "--noheader", "--states=PENDING", option("jobs", job), "--format=%P|%D|%x"])
        if not fields:
            return False
        partition, needed, excluded = fields.split("|")
        former = self.expand(excluded)
        wanted = sorted({*former, *nodes})
        options = ("--noheader", "--Node", option("partition", partition), "--format=%N")
        others = sorted(set(self._ask(["sinfo", *options]).split()) - set(wanted))
        if len(self.good_nodes(others)) < int(needed):
            return False  # it would wait for ever
        try:
            self._ask(["scontrol", "update", f"JobId={job}", f"ExcNodeList={','.join(wanted)}"])
        except UserError:
            return False  # it has begun meanwhile
        return True

    def _fields(self, command: list[str]) -> str:
        try:
            return self._ask(command).strip()
        except UserError as error:
            if "Invalid job id" in str(error):
                return ""
            raise

    def _ask(self, command: list[str]) -> str:
        return insist(lambda: ask(command), self._notify, self._patience_seconds)


def _states_command(nodes: Sequence[str]) -> list[str]:
    return ["sinfo", "--noheader", "--Node", option("nodes", ",".join(nodes)), "--format=%N %t"]


def _node_states(lines: str) -> dict[str, str]:
    return dict(line.split() for line in lines.splitlines())


class NodeStatePoller:
    """Asks the controller for the states of nodes now and then, on a thread; its last answer counts while it is away.

    Args:
        controller: who is asked.
        every_seconds: at least, between two questions.
    """

    def __init__(self, controller: Controller, every_seconds: float):
        self._controller, self._every_seconds = controller, every_seconds
        self._question: threading.Thread | None = None
        self._asked_at = -every_seconds
        self._states: Mapping[str, str] = {}
        """By the last answer."""
        self._told: set[str] = set()

    def newly_unresponsive(self, nodes: Sequence[str]) -> list[str]:
        """Those of some nodes that Slurm has lost sight of since the last call. Never waits."""
        is_asking = self._question is not None and self._question.is_alive()
        if not is_asking and time.monotonic() - self._asked_at >= self._every_seconds:
            self._asked_at = time.monotonic()
            self._question = threading.Thread(target=self._ask, args=(list(nodes),), daemon=True)
            self._question.start()
        unseen = {node for node in nodes if NO_ANSWER_SIGN in self._states.get(node, "")}
        news = sorted(unseen - self._told)
        self._told = unseen  # one that was seen again and is lost again is news
        return news

    def is_good(self, node: str) -> bool:
        """Whether Slurm found nothing wrong with a node when it last answered; so it is before it has."""
        return not any(word in self._states.get(node, "") for word in BAD_NODE_WORDS)

    def _ask(self, nodes: list[str]) -> None:
        with suppress(UserError, NoAnswer):
            self._states = self._controller.states_of(nodes)
