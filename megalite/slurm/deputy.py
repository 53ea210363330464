"""The supervisor's deputy: a process on another node of the job that ends the job when the supervisor's node dies.

A job that keeps going without its lost nodes (`--no-kill`) also keeps going without its first one, where the
supervisor runs: Slurm would let the rest idle until the time limit. The deputy looks for the supervisor's sign of life,
and cancels the job when there is none; the next job of the chain then starts.

    python -m megalite.slurm.deputy RUN JOB
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from megalite.slurm.controller import Controller
from megalite.slurm.folder import LaunchFolder
from megalite.slurm.hosts import Hosts
from megalite.train.in_place import clock_of

SECONDS_BETWEEN_LOOKS = 1.0

LONGEST_SILENCE_SECONDS = 10.0
"""Of the supervisor, of which a thread gives a sign each second."""


class Deputy:
    """The supervisor's handle on its deputy.

    Args:
        folder: of the run.
        job: number of the batch job.
    """

    def __init__(self, folder: LaunchFolder, job: str):
        self._folder, self._job = folder, job
        self._process: subprocess.Popen | None = None

    def post(self, hosts: Hosts, own_node: str) -> None:
        """See to it that there is one, on a node that is not the supervisor's; a job of one node has none."""
        others = [node for node in (*hosts.used, *hosts.spares) if node != own_node]
        if not others or (self._process is not None and self._process.poll() is None):
            return
        command = [
            *("srun", "--job-name=deputy", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={others[-1]}"),
            *("--export=ALL", f"--output={self._folder.path}/deputy.log", "--open-mode=append"),
            *(sys.executable, "-m", "megalite.slurm.deputy", str(self._folder.run_dir), self._job),
        ]
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)

    def dismiss(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.terminate()


def keep_watch(folder: LaunchFolder, job: str) -> None:
    """Wait for the supervisor's silence, then cancel the job."""
    while True:
        time.sleep(SECONDS_BETWEEN_LOOKS)
        silence = clock_of(folder.path) - folder.alive.stat().st_mtime
        if silence > LONGEST_SILENCE_SECONDS:
            folder.add_event("supervisor lost", job=job, why=f"no sign of it for {silence:.0f} s; the job is cancelled")
            Controller().cancel(job)
            return


if __name__ == "__main__":
    keep_watch(LaunchFolder(Path(sys.argv[1])), sys.argv[2])
