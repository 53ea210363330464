"""One driver's workers in Slurm's queue: submitted as arrays, counted, cancelled; all known by one job name.

The name is Slurm's own memory of what was submitted, so an array whose driver died in the moment of submitting it is
found as well.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from megalite.errors import UnavailableError, UserError
from megalite.slurm_commands import NoAnswer, ask, insist
from megalite.slurm_quoting import option, option_of_logs

SECONDS_BETWEEN_LOOKS = 0.3
"""At jobs that are about to end."""

ENDED = frozenset(
    (
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED"),
        *("NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"),
    )
)
"""Last states of a job. Between work and these it is COMPLETING, and does not say yet why."""

HOPELESS = (
    *("BadConstraints", "DependencyNeverSatisfied", "InvalidAccount", "InvalidQOS", "PartitionConfig"),
    *("PartitionNodeLimit", "PartitionTimeLimit"),
)
"""Reasons of a job that waits and will never run. Those with `PerJob` in them are limits on what one may ask for."""

OWNED = dict.fromkeys(
    (
        *("--array", "-a", "--job-name", "-J", "--output", "-o", "--wrap", "--parsable", "--requeue", "--no-requeue"),
        *("--kill-on-invalid-dep", "--wait", "-W"),
    ),
    "",
)
"""Options of sbatch that cannot be given, because they are set here."""


class Element(NamedTuple):
    """One element of an array: a worker, as Slurm sees it."""

    name: str
    """ARRAY_INDEX, as scancel takes it."""
    state: str
    node: str
    reason: str
    """Why it waits, or why it ended."""

    @property
    def is_there(self) -> bool:
        """Whether it waits, runs, or is about to end."""
        return self.state not in ENDED

    @property
    def does_work(self) -> bool:
        """Whether it waits or runs."""
        return self.is_there and self.state != "COMPLETING"

    @property
    def waits_for_ever(self) -> bool:
        """Whether it asks for something that will never be there: Slurm takes such jobs, and lets them wait."""
        return self.state == "PENDING" and (self.reason in HOPELESS or "PerJob" in self.reason)


class SlurmQueue:
    """The jobs of one name.

    Args:
        name: of the jobs; equal for drivers that must not work at the same time.
        notify: told what a user may want to know.

    Raises:
        UnavailableError: there is no Slurm here.
    """

    def __init__(self, name: str, notify: Callable[[str], None]):
        if shutil.which("sbatch") is None:
            raise UnavailableError(
                "--runner slurm needs Slurm's commands, and there is no sbatch here; run this on a login node of a "
                "Slurm cluster, or use --runner local"
            )
        self.name = name
        self._notify = notify

    def submit(self, count: int, script: str, *, options: Sequence[str], logs: Path) -> list[str]:
        """Submit arrays of some elements in all: one, unless the cluster's MaxArraySize is smaller.

        Args:
            count: elements.
            script: shell lines that each element runs.
            options: further options of sbatch.
            logs: folder for the elements' output.

        Returns:
            The arrays' numbers.

        Raises:
            UserError: Slurm refuses the job.
        """
        largest, jobs = self._max_array_size(), []
        while count:
            size = min(count, largest)
            command = [
                *("sbatch", "--parsable", *options),
                *(option("array", f"0-{size - 1}"), option("job-name", self.name)),
                option_of_logs(logs.absolute(), "%A_%a.log"),
                # a lost element is for the driver to replace: Slurm waits two minutes before it starts one anew
                *("--no-requeue", "--kill-on-invalid-dep=yes", option("wrap", script)),
            ]
            jobs.append(insist(partial(ask, command), self._notify).split(";")[0].strip())
            count -= size
        return jobs

    def elements(self) -> dict[str, Element]:
        """All elements that Slurm remembers, by name: those that wait or run, and for some minutes those that ended.

        Raises:
            NoAnswer: the controller is away.
            UserError: Slurm refuses to say.
        """
        options = ("--noheader", "--array", "--states=all", option("name", self.name), option("users", os.getuid()))
        lines = ask(["squeue", *options, "--format=%F_%K|%T|%N|%r"]).splitlines()
        found = [Element(*(part.strip() for part in line.split("|"))) for line in lines]
        return {element.name: element for element in found}

    def await_elements(self) -> dict[str, Element]:
        """As `elements`, asked until there is an answer.

        Raises:
            UnavailableError: there was none for too long.
        """
        return insist(self.elements, self._notify)

    def cancel(self, name: str) -> None:
        """Cancel one element, if Slurm answers."""
        with suppress(NoAnswer, UserError):
            ask(["scancel", "--quiet", name])

    def cancel_all(self, patience_seconds: float, *, only: str = "") -> bool:
        """Cancel all elements and wait until none is left; False when that could not be brought about.

        Args:
            patience_seconds: to try for.
            only: cancel elements in this state, and wait for the others to end by themselves.
        """
        deadline = time.monotonic() + patience_seconds
        mine = [option("jobname", self.name), option("user", os.getuid())]
        mine += [option("state", only)] if only else []
        while time.monotonic() < deadline:
            with suppress(NoAnswer, UserError):
                ask(["scancel", "--quiet", *mine])
                if not any(element.is_there for element in self.elements().values()):
                    return True
            time.sleep(SECONDS_BETWEEN_LOOKS)
        return False

    def _max_array_size(self) -> int:
        for line in insist(partial(ask, ["scontrol", "show", "config"]), self._notify).splitlines():
            if line.startswith("MaxArraySize"):
                return max(1, int(line.split("=")[1]))
        return 1001  # Slurm's own default
