"""Trials as Slurm runs: each is launched as `megalite launch` would, and watched through the files of its folder.

Ctrl-C ends the watching alone: the jobs go on, and the sweep gathers what came of them when it is run again. A
supervisor that dies with its job says nothing more, so the queue is asked, too: a trial that has not ended and has no
job there is launched again when the sweep is, and is not waited for.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from megalite.errors import DataError, UserError
from megalite.slurm.cluster import ClusterConfig
from megalite.slurm.controller import Controller
from megalite.slurm.folder import ENDED, LaunchFolder
from megalite.slurm.launch import launch, plan_launch
from megalite.slurm.render import job_name
from megalite.sweeps.outcome import TrialOutcome, read_outcome
from megalite.sweeps.trials import Complaints, Trial

SECONDS_BETWEEN_LOOKS = 2.0

SECONDS_BETWEEN_QUESTIONS = 15.0
"""To Slurm, about a trial that has not ended."""

GRACE_SECONDS = 60.0
"""Without a job in the queue, after which a trial is over: what a supervisor wrote last may be seen late here."""


@dataclass
class _Watched:
    """A trial whose jobs wait or run."""

    trial: Trial
    ask_at: float = 0.0
    """When Slurm is asked about it next."""
    ended_since: float | None = None
    """When it was first found to have said how it ended."""
    gone_since: float | None = None
    """When it was first found to have no job."""


class ClusterRunner:
    """Starts trials as jobs.

    Args:
        cluster: where.
        metric: of the trials.
        jobs: how many at a time are in the queue or run.
        num_nodes: of each; None takes what its layout needs.
    """

    def __init__(self, cluster: ClusterConfig, metric: str, jobs: int, num_nodes: int | None = None):
        self._cluster, self._metric, self._jobs, self._num_nodes = cluster, metric, jobs, num_nodes
        self._live: list[_Watched] = []
        self._refused: list[tuple[Trial, TrialOutcome]] = []
        self._due = 0.0

    @property
    def has_room(self) -> bool:
        """Whether another trial may be submitted."""
        return len(self._live) < self._jobs

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits or runs."""
        return not self._live and not self._refused

    def check(self, trials: list[Trial]) -> None:
        """Place every trial on the cluster before the first is submitted.

        Raises:
            ConfigError: with every complaint.
        """
        complaints = Complaints()
        for trial in trials:
            try:
                plan_launch(trial.config, self._cluster, self._num_nodes)
            except UserError as error:
                complaints.add(error, trial.name, trial.about)
        complaints.refuse()

    def start(self, trial: Trial) -> None:
        """Submit a trial; one whose jobs are live is only watched."""
        has_jobs = _has_jobs(trial)
        if has_jobs or (has_jobs is None and _status(trial) not in (None, *ENDED)):
            self._live.append(_Watched(trial))
            return
        try:
            launch(trial.config, self._cluster, self._num_nodes)
        except UserError as error:
            self._refused.append((trial, TrialOutcome("failed", why=str(error))))
            return
        self._live.append(_Watched(trial))

    def ended(self) -> list[tuple[Trial, TrialOutcome]]:
        """Trials that have ended since it was last asked."""
        over, self._refused = self._refused, []
        if time.monotonic() < self._due:
            return over
        self._due = time.monotonic() + SECONDS_BETWEEN_LOOKS
        for watched in list(self._live):
            outcome = self._look_at(watched)
            if outcome is not None:
                self._live.remove(watched)
                over.append((watched.trial, outcome))
        return over

    def _look_at(self, watched: _Watched) -> TrialOutcome | None:
        """What came of a trial; None while it has jobs. The last may still be ending, on a dead node for hours: once a
        trial has said how it ended, that is waited for no longer than a job that is gone."""
        now, status = time.monotonic(), _status(watched.trial)
        if status in ENDED and watched.ended_since is None:
            watched.ended_since = watched.ask_at = now
        if now < watched.ask_at:
            return None
        watched.ask_at = now + SECONDS_BETWEEN_QUESTIONS
        has_jobs = _has_jobs(watched.trial)
        if status in ENDED and watched.ended_since is not None:
            is_over = not has_jobs or now - watched.ended_since >= GRACE_SECONDS
            return self._outcome(watched.trial, status) if is_over else None
        if has_jobs is not False:
            watched.gone_since = None
            return None
        watched.gone_since = now if watched.gone_since is None else watched.gone_since
        return self._outcome_of_lost(watched.trial) if now - watched.gone_since >= GRACE_SECONDS else None

    def _outcome(self, trial: Trial, status: str) -> TrialOutcome:
        code = {"gave up": 1, "stopped": 3}.get(status, 0)
        found = read_outcome(trial.folder, self._metric, code=code, wanted_steps=trial.steps)
        if found.state not in ("stopped", "failed") or status in ("stopped", "finished"):
            return found
        why = LaunchFolder(trial.folder.absolute()).known_state().get("why") or status
        return TrialOutcome("failed", None, found.steps, found.seconds, found.tokens, str(why))

    def _outcome_of_lost(self, trial: Trial) -> TrialOutcome:
        """Of a trial whose jobs ended without a word: its run may have ended all the same, or else goes on later."""
        found = read_outcome(trial.folder, self._metric, wanted_steps=trial.steps)
        folder = LaunchFolder(trial.folder.absolute())
        why = f"no job of it is in the queue, and none has said how it ended; see {folder.jobs}"
        try:
            folder.read_state()
        except DataError as error:
            why = f"no job of it is in the queue, and how it ended cannot be read: {error}"
        return found if found.state in ("done", "diverged") else replace(found, state="stopped", value=None, why=why)

    def stop(self, *, at_once: bool) -> None:
        """Leave them alone: whoever wants them to end asks `megalite launch stop`."""
        self._live, self._refused = [], []


def _status(trial: Trial) -> str | None:
    """What the supervisor of a trial said last; None before the first launch, or where that is damaged."""
    status = LaunchFolder(trial.folder.absolute()).known_state().get("status")
    return None if status is None else str(status)


def _has_jobs(trial: Trial) -> bool | None:
    """Whether jobs of a trial wait, run or are being ended; None where Slurm does not say."""
    try:
        controller = Controller(notify=lambda why: None, patience_seconds=0.0)
        return bool(controller.live_jobs(job_name(trial.folder.absolute())))
    except UserError:
        return None
