"""The supervisor's deputies: processes on other nodes of the job that end it when the supervisor cannot.

A job that keeps going without its lost nodes (`--no-kill`) also keeps going without its first one, where the
supervisor runs: Slurm would let the rest idle until the time limit. A deputy looks for the supervisor's sign of life,
and cancels the job when there is none, or when the supervisor asks for it because its own node is cut off from Slurm;
the next job of the chain then starts. There are some, far from each other, for several nodes may die at once.

    python -m megalite.slurm.deputy RUN JOB HOME NODE...
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
from megalite.slurm.controller import Controller
from megalite.slurm.desk import Desk
from megalite.slurm.folder import LaunchFolder
from megalite.slurm_words import option
from megalite.train.in_place import read_in_place

NUM_DEPUTIES = 3

SECONDS_BETWEEN_LOOKS = 1.0

LONGEST_SILENCE_SECONDS = 10.0
"""Of the supervisor, of which a thread gives a sign each second."""

SECONDS_BETWEEN_DEPUTIES = 2.0
"""The first acts at once, the others when it has not ended the job by then."""


class Deputies:
    """The supervisor's handle on its deputies.

    Args:
        folder: of the run.
        job: number of the batch job.
    """

    def __init__(self, folder: LaunchFolder, job: str):
        self._folder, self._job = folder, job
        self._process: subprocess.Popen | None = None
        self._nodes: list[str] = []
        self._home: Path | None = None

    def post(self, nodes: Sequence[str], own_node: str, home: Path) -> None:
        """See to it that there are some, on nodes that are not the supervisor's; a job of one node has none.

        Args:
            nodes: of the job, that are there.
            own_node: the supervisor's.
            home: where it meets the agents.
        """
        chosen = spread([node for node in nodes if node != own_node], NUM_DEPUTIES)
        are_there = self._home == home and self._process is not None and self._process.poll() is None
        if not chosen or (are_there and set(self._nodes) <= set(nodes)):
            return
        self.dismiss()
        self._nodes, self._home = chosen, home
        command = [
            *("srun", "--job-name=deputies", "--overlap", option("nodelist", ",".join(chosen))),
            *(option("nodes", len(chosen)), option("ntasks", len(chosen)), "--ntasks-per-node=1"),
            *("--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--export=ALL"),
            *(sys.executable, "-m", "megalite.slurm.deputy", str(self._folder.run_dir), self._job, str(home), *chosen),
        ]
        with open(self._folder.path / "deputies.log", "ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def dismiss(self) -> None:
        """End them."""
        if self._process is not None:
            self._process.terminate()


def spread(nodes: Sequence[str], num: int) -> list[str]:
    """Some nodes, far from each other in their order, the last one among them."""
    if len(nodes) <= num:
        return list(nodes)
    return [nodes[len(nodes) * place // num - 1] for place in range(1, num + 1)]


class Silence:
    """How long somebody has not given a sign of life in a file, by this process's own clock.

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


def keep_watch(folder: LaunchFolder, job: str, desk: Desk, place: int) -> None:
    """Wait until the supervisor cannot, then cancel the job.

    Args:
        place: of this deputy among all; later ones leave it to earlier ones for a while.
    """
    silence = Silence(folder.alive)
    while True:
        time.sleep(SECONDS_BETWEEN_LOOKS)
        seconds, handover = silence.seconds(), desk.handover()
        if seconds > LONGEST_SILENCE_SECONDS or handover is not None:
            break
    time.sleep(place * SECONDS_BETWEEN_DEPUTIES)
    why = handover["why"] if handover else f"no sign of it for {seconds:.0f} s"
    controller = Controller()
    bad, next_job = (handover["nodes"] if handover else []), folder.read_state().get("next_job")
    excluded = bad if bad and next_job and controller.exclude_nodes(next_job, bad) else []
    with suppress(OSError):
        what = "supervisor cut off" if handover else "supervisor lost"
        folder.add_event(what, job=job, why=f"{why}; the job is cancelled", excluded=excluded)
    controller.cancel(job)


def main() -> None:
    """Entry of a deputy."""
    folder, job, desk, nodes = LaunchFolder(Path(sys.argv[1])), sys.argv[2], Desk(Path(sys.argv[3])), sys.argv[4:]
    while True:
        with suppress(UserError):  # Slurm has been away for too long: there is nobody else to do it
            keep_watch(folder, job, desk, nodes.index(os.environ["SLURMD_NODENAME"]))
            return


if __name__ == "__main__":
    main()
