"""Tasks as a Slurm array: each element of it does every n-th task that has no report yet.

    driver   sbatch --array=0-15 ...                               then waits for the reports in the folder
    element  megalite data work FOLDER PHASE --share 3/16          on any node; the folder's disk is shared

The driver is `megalite data prepare` itself, on the login node or in a small job. When the array has ended and reports
are missing (a node died, a time limit), a further array does what is missing, as long as each brings some progress.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from megalite.data.tasks import missing_tasks
from megalite.errors import DataError, UnavailableError

SECONDS_BETWEEN_LOOKS = 2.0

COMMAND_TIMEOUT_SECONDS = 60.0


class SlurmArray:
    """Runs tasks by submitting array jobs.

    Args:
        num_jobs: elements of an array at most.
        options: further options of sbatch, as in ["--partition=cpu", "--time=4:00:00"].
        logs: folder for the elements' output.
    """

    def __init__(self, num_jobs: int, options: Sequence[str] = (), logs: Path = Path("logs")):
        self._num_jobs = num_jobs
        self._options = list(options)
        self._logs = logs

    def run(self, folder: Path, phase: str, numbers: Sequence[int]) -> Iterator[int]:
        missing = set(numbers)
        while missing:
            before = set(missing)
            job = self._submit(folder, phase, len(missing))
            while True:
                running = _is_running(job)  # asked first: what is missing after the end is missing
                done = missing - set(missing_tasks(folder, phase))
                yield from sorted(done)
                missing -= done
                if not running:
                    break
                time.sleep(SECONDS_BETWEEN_LOOKS)
            if missing == before:
                raise DataError(
                    f"Slurm job {job} ended without finishing any of the {len(missing)} tasks of phase {phase!r}; "
                    f"its output is in {self._logs.absolute()}: read it, then run the same command again"
                )

    def _submit(self, folder: Path, phase: str, num_tasks: int) -> str:
        self._logs.mkdir(parents=True, exist_ok=True)
        command = [
            "sbatch",
            "--parsable",
            f"--array=0-{min(self._num_jobs, num_tasks) - 1}",
            f"--output={self._logs.absolute()}/%x-%A-%a.log",
            f"--job-name=megalite-{phase}",
            *self._options,
            f"--wrap={_worker_command(folder, phase)}",
        ]
        return _ask(command).split(";")[0].strip()


def _worker_command(folder: Path, phase: str) -> str:
    """The shell line of each element: this very Python, so that no environment has to be set up."""
    command = [sys.executable, "-m", "megalite", "data", "work", str(folder.absolute()), phase]
    share = "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT"
    return f'exec srun --ntasks=1 {shlex.join(command)} --share "{share}"'


def _is_running(job: str) -> bool:
    """Whether any element of an array waits or runs; Slurm forgets a job some minutes after its end."""
    try:
        return bool(_ask(["squeue", "--noheader", f"--jobs={job}"]).strip())
    except DataError as error:
        if "Invalid job id" in str(error):
            return False
        raise


def _ask(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_SECONDS)
    except FileNotFoundError as error:
        raise UnavailableError(
            f"--runner slurm needs Slurm's commands, and there is no {command[0]} here; use --runner local"
        ) from error
    if done.returncode:
        raise DataError(f"{command[0]} failed: {done.stderr.strip()}")
    return done.stdout
