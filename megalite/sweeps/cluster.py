"""Trials as Slurm runs: each is launched as `megalite launch` would, and watched through the files of its folder.

Ctrl-C ends the watching alone: the jobs go on, and the sweep gathers what came of them when it is run again.
"""

from __future__ import annotations

import time

from megalite.errors import UserError
from megalite.slurm.cluster import ClusterConfig
from megalite.slurm.folder import ENDED, LaunchFolder
from megalite.slurm.launch import launch, plan_launch
from megalite.sweeps.outcome import TrialOutcome, read_outcome
from megalite.sweeps.trials import Complaints, Trial

SECONDS_BETWEEN_LOOKS = 2.0


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
        self._live: list[Trial] = []
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
        if self._status(trial) not in (None, *ENDED):
            self._live.append(trial)
            return
        try:
            launch(trial.config, self._cluster, self._num_nodes)
        except UserError as error:
            self._refused.append((trial, TrialOutcome("failed", why=str(error))))
            return
        self._live.append(trial)

    def ended(self) -> list[tuple[Trial, TrialOutcome]]:
        """Trials that have ended since it was last asked."""
        over, self._refused = self._refused, []
        if time.monotonic() < self._due:
            return over
        self._due = time.monotonic() + SECONDS_BETWEEN_LOOKS
        for trial in list(self._live):
            status = self._status(trial)
            if status in ENDED:
                self._live.remove(trial)
                over.append((trial, self._outcome(trial, status)))
        return over

    def _outcome(self, trial: Trial, status: str) -> TrialOutcome:
        found = read_outcome(trial.folder, self._metric, code={"gave up": 1, "stopped": 3}.get(status, 0))
        if found.state not in ("stopped", "failed") or status == "stopped":
            return found
        why = LaunchFolder(trial.folder.absolute()).read_state().get("why") or status
        return TrialOutcome("failed", None, found.steps, found.seconds, found.tokens, str(why))

    def _status(self, trial: Trial) -> str | None:
        status = LaunchFolder(trial.folder.absolute()).read_state().get("status")
        return None if status is None else str(status)

    def stop(self, *, at_once: bool) -> None:
        """Leave them alone: whoever wants them to end asks `megalite launch stop`."""
        self._live, self._refused = [], []
