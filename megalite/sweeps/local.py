"""Trials on this machine: each a `megalite train` of its own, one after another or several at a time.

Requests to stop are passed on to all; a trial then saves and ends, and goes on when the sweep does. When the sweep is
killed, the kernel tells its trials.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from megalite.config.load import dump_config
from megalite.host import num_cores
from megalite.sweeps.outcome import TrialOutcome, read_outcome
from megalite.sweeps.trials import Trial
from megalite.train.signals import PR_SET_PDEATHSIG

CONFIGS, LOGS = "configs", "logs"
"""Folders of a sweep: the config of each trial, and what its process said."""

TAIL_BYTES = 4096
PREFIX = "megalite: "


class LocalRunner:
    """Starts trials as processes.

    Args:
        folder: of the sweep.
        metric: of the trials.
        jobs: how many at a time.
    """

    def __init__(self, folder: Path, metric: str, jobs: int):
        self._folder, self._metric, self._jobs = folder, metric, jobs
        self._running: dict[subprocess.Popen, Trial] = {}
        self._is_ending = False

    @property
    def has_room(self) -> bool:
        """Whether another trial may be started."""
        return len(self._running) < self._jobs

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs."""
        return not self._running

    def start(self, trial: Trial) -> None:
        """Begin a trial, or go on with it."""
        path = write_trial(self._folder, trial)
        log_path = log_of(self._folder, trial)
        log_path.parent.mkdir(exist_ok=True)
        threads = max(1, num_cores() // (self._jobs * trial.world_size))
        with open(log_path, "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "megalite", "train", str(path)],
                env={"OMP_NUM_THREADS": str(threads), **os.environ},
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches the sweep alone, which passes it on once
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )
        self._running[process] = trial

    def ended(self) -> list[tuple[Trial, TrialOutcome]]:
        """Trials that have ended since it was last asked."""
        over = {process: trial for process, trial in self._running.items() if process.poll() is not None}
        for process in over:
            del self._running[process]
        return [(trial, self._outcome(trial, process.returncode)) for process, trial in over.items()]

    def _outcome(self, trial: Trial, code: int) -> TrialOutcome:
        found = read_outcome(trial.folder, self._metric, code=code, wanted_steps=trial.steps)
        if self._is_ending and found.state == "failed":  # it may have been killed at the user's own wish
            return replace(found, state="stopped", why="ended with the sweep")
        said = _last_words(log_of(self._folder, trial)) if found.state == "failed" and code else ""
        return replace(found, why=said) if said else found

    def stop(self, *, at_once: bool) -> None:
        """Ask all to save and end, or end them."""
        self._is_ending = True
        for process in list(self._running):
            with contextlib.suppress(ProcessLookupError):
                if at_once:
                    os.killpg(process.pid, signal.SIGKILL)
                else:
                    process.send_signal(signal.SIGTERM)


def write_trial(folder: Path, trial: Trial) -> Path:
    """The config of a trial, as a file."""
    path = folder / CONFIGS / f"{trial.name}.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(dump_config(trial.config), encoding="utf-8")
    return path


def log_of(folder: Path, trial: Trial) -> Path:
    """What its processes said."""
    return folder / LOGS / f"{trial.name}.log"


def _end_with_parent() -> None:
    """In a child, before it becomes what it is: SIGTERM when the sweep ends, however it does."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _last_words(path: Path) -> str:
    """The last line of a log in which megalite says something, or else the last one."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
        own = [line.removeprefix(PREFIX) for line in lines if line.startswith(PREFIX) and "output is in" not in line]
        return (own or lines or [""])[-1]
    return ""
