"""Watchdogs over the supervisor: processes on other nodes of the job that end it when the supervisor cannot.

A job that keeps going without its lost nodes (`--no-kill`) also keeps going without its first one, where the
supervisor runs: Slurm would let the rest idle until the time limit. A watchdog looks for the supervisor's sign of life,
and cancels the job when there is none, or when the supervisor asks for it because its own node is cut off from Slurm;
the next job of the chain then starts. There are some, far from each other, for several nodes may die at once.

    python -m megalite.slurm.watchdog RUN JOB HOME NODE...
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from megalite.errors import UserError
from megalite.slurm.control_channel import ControlChannel
from megalite.slurm.controller import Controller
from megalite.slurm.folder import LaunchFolder
from megalite.slurm_quoting import option
from megalite.train.in_place import read_in_place

NUM_WATCHDOGS = 3

POLL_SECONDS = 1.0

ENDED_BY_WATCHDOG = ("supervisor_cut_off", "supervisor_lost")
"""Events: of a job that a watchdog has ended."""

LONGEST_SILENCE_SECONDS = 10.0
"""Of the supervisor, of which a thread gives a sign each second."""

SECONDS_BETWEEN_WATCHDOGS = 2.0
"""The first acts at once, the others when it has not ended the job by then."""


class Watchdogs:
    """The supervisor's handle on its watchdogs.

    Args:
        folder: of the run.
        job: number of the batch job.
    """

    def __init__(self, folder: LaunchFolder, job: str):
        self._folder, self._job = folder, job
        self._process: subprocess.Popen | None = None
        self._nodes: list[str] = []
        self._home: Path | None = None

    def start(self, nodes: Sequence[str], own_node: str, home: Path) -> None:
        """See to it that there are some, on nodes that are not the supervisor's; a job of one node has none.

        Args:
            nodes: of the job, that are there.
            own_node: the supervisor's.
            home: where it meets the agents.
        """
        chosen = spread([node for node in nodes if node != own_node], NUM_WATCHDOGS)
        are_there = self._home == home and self._process is not None and self._process.poll() is None
        if not chosen or (are_there and set(self._nodes) <= set(nodes)):
            return
        self.stop()
        self._nodes, self._home = chosen, home
        command = [
            *("srun", "--job-name=watchdogs", "--overlap", option("nodelist", ",".join(chosen))),
            *(option("nodes", len(chosen)), option("ntasks", len(chosen)), "--ntasks-per-node=1"),
            *("--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--export=ALL"),
            *(sys.executable, "-m", "megalite.slurm.watchdog"),
            *(str(self._folder.run_dir), self._job, str(home), *chosen),
        ]
        with open(self._folder.path / "deputies.log", "ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def stop(self) -> None:
        """End them."""
        if self._process is not None:
            self._process.terminate()


def spread(nodes: Sequence[str], num: int) -> list[str]:
    """Some nodes, far from each other in their order, the last one among them."""
    if len(nodes) <= num:
        return list(nodes)
    return [nodes[len(nodes) * place // num - 1] for place in range(1, num + 1)]


class LivenessTimer:
    """Since when there has been no sign of life in a file, by this process's own clock.

    While the file cannot be read nothing can be said, and it counts from then anew.
    """

    def __init__(self, path: Path):
        self._path = path
        self._last: float | None = None
        self._since = time.monotonic()

    def seconds(self) -> float:
        """Since the last sign, as often as this is called."""
        said, written = read_in_place(self._path)
        if said is None or written != self._last:
            self._last, self._since = written, time.monotonic()
        return time.monotonic() - self._since


def watch_supervisor(folder: LaunchFolder, job: str, channel: ControlChannel, place: int) -> None:
    """Wait until the supervisor cannot, then cancel the job.

    Args:
        place: of this watchdog among all; later ones leave it to earlier ones for a while.
    """
    timer = LivenessTimer(folder.alive)
    while True:
        time.sleep(POLL_SECONDS)
        seconds, handover = timer.seconds(), channel.handover()
        if seconds > LONGEST_SILENCE_SECONDS or handover is not None:
            break
    time.sleep(place * SECONDS_BETWEEN_WATCHDOGS)
    why = handover["why"] if handover else f"no sign of it for {seconds:.0f} s"
    controller = Controller()
    bad, next_job = (handover["nodes"] if handover else []), folder.known_state().get("next_job")
    excluded = bad if bad and next_job and controller.exclude_nodes(next_job, bad) else []
    with suppress(OSError):
        what = ENDED_BY_WATCHDOG[0] if handover else ENDED_BY_WATCHDOG[1]
        folder.add_event(what, job=job, why=f"{why}; the job is cancelled", excluded=excluded)
    controller.cancel(job)


def main() -> None:
    """Entry of a watchdog."""
    folder, job, channel, nodes = (
        LaunchFolder(Path(sys.argv[1])),
        sys.argv[2],
        ControlChannel(Path(sys.argv[3])),
        sys.argv[4:],
    )
    while True:
        with suppress(UserError):  # Slurm has been away for too long: there is nobody else to do it
            watch_supervisor(folder, job, channel, nodes.index(os.environ["SLURMD_NODENAME"]))
            return


if __name__ == "__main__":
    main()
