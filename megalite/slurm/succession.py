"""A job of the chain begins: may it take the run over from the one before?

The next job starts as soon as the former one gives its nodes back, and for Slurm that is when the former one is being
ended, not when its supervisor has said what is to follow. A person's scancel means the whole chain; so where the former
supervisor has not spoken yet, it is waited for, as long as it lives. If it never speaks, Slurm is asked who ended it.
"""

from __future__ import annotations

import time

from megalite.slurm.controller import Controller
from megalite.slurm.folder import ENDED, LaunchFolder
from megalite.slurm.watchdog import ENDED_BY_WATCHDOG, LivenessTimer

POLL_SECONDS = 0.5

SILENCE_SECONDS = 5.0
"""A supervisor beats each second; one that has not for so long is gone."""


def find_end_of_chain(folder: LaunchFolder, job: str, controller: Controller) -> tuple[str, str] | None:
    """How the chain has ended before a job that has just begun, and why; None where the job is to go on with the run.

    To be asked before the job gives a sign of life of its own.
    """
    state, timer = folder.read_state(), LivenessTimer(folder.alive)
    former = state.get("job")
    if former in (None, job):
        return None
    while (
        _is_silent(state, former)
        and folder.alive.exists()
        and timer.seconds() < SILENCE_SECONDS
        and controller.is_ending(former)
    ):
        time.sleep(POLL_SECONDS)
        state = folder.read_state()
    if state["job"] == former and state["status"] in ENDED:
        return state["status"], f"as job {former} has said"
    if _is_silent(state, former) and _was_ended_by_a_person(folder, former, controller):
        return "cancelled", f"scancel of job {former}"
    return None


def _is_silent(state: dict, former: str) -> bool:
    """Whether a supervisor has not said yet what follows its job."""
    return state["job"] == former and state["status"] == "running"


def _was_ended_by_a_person(folder: LaunchFolder, former: str, controller: Controller) -> bool:
    """Whether a job that is over was cancelled, and not by a watchdog that missed its supervisor."""
    by_watchdog = any(event["event"] in ENDED_BY_WATCHDOG and event["job"] == former for event in folder.read_events())
    return not by_watchdog and not controller.is_ending(former) and controller.was_cancelled(former)
