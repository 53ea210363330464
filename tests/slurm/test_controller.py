"""What Slurm says of jobs, as the launcher understands it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalite.slurm.controller import Controller
from tests.kit.slurm import BRIEF, URGENT, Cluster, until


@pytest.mark.slow
def test_a_preempted_job_was_not_cancelled(tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch):
    """Nor is it one when it saves for longer than its time of grace, and Slurm ends it as by scancel."""
    for name in ("PATH", "SLURM_TB_DIR"):
        monkeypatch.setenv(name, cluster.environment[name])
    controller, end = Controller(), tmp_path / "end"
    save = f"trap : TERM; until test -e {end}; do sleep 0.2; done"
    options = (f"--partition={BRIEF}", "--no-requeue", "--exclusive", "--output=/dev/null", f"--wrap={save}")
    preempted, cancelled, other = (cluster.sbatch(*options) for _ in range(3))

    def state(job: str) -> str:
        return cluster.states(jobs=job)[job]

    until(lambda: {state(job) for job in (preempted, cancelled, other)} == {"RUNNING"}, "the jobs' start")
    node = cluster.slurm("squeue", "--noheader", f"--jobs={preempted}", "--format=%N")
    urgent = cluster.sbatch(
        f"--partition={URGENT}", "--exclusive", f"--nodelist={node}", "--output=/dev/null", "--wrap=:"
    )
    cluster.slurm("scancel", cancelled)
    until(lambda: state(preempted) == state(cancelled) == "COMPLETING", "Slurm to end both jobs")
    assert [controller.was_cancelled(job) for job in (preempted, cancelled, other)] == [False, True, False]
    end.touch()
    for job in (preempted, cancelled, other, urgent):
        cluster.wait_for_end(job)
    assert [controller.was_cancelled(job) for job in (preempted, cancelled, other)] == [False, True, False]
    assert not controller.was_cancelled("999999")
