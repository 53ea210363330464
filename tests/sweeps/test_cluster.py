"""Trials as Slurm runs, where `megalite launch` is pretended: what is submitted, watched and gathered."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megalite.errors import UnavailableError, UserError
from megalite.slurm.cluster import ClusterConfig
from megalite.slurm.folder import LaunchFolder
from megalite.sweeps import cluster as module
from megalite.sweeps.cluster import ClusterRunner
from megalite.sweeps.outcome import TrialOutcome
from megalite.sweeps.settings import SweepConfig
from megalite.sweeps.sweep import SweepRun, prepare
from megalite.sweeps.trials import Trial
from tests.kit.runs import write_run
from tests.report.conftest import make_run

PROFILE = ClusterConfig(name="pretended", gpus_per_node=0, ranks_per_node=1)


class Queue:
    """A controller that knows which runs have jobs, by the names of their folders; None when it gives no answer."""

    def __init__(self, *names: str):
        self.names: list[str] | None = list(names)
        self.num_questions = 0

    def __call__(self, **options) -> Queue:
        return self

    def live_jobs(self, name: str) -> list[str]:
        self.num_questions += 1
        if self.names is None:
            raise UnavailableError("Slurm has not answered")
        return ["7"] if any(name.startswith(f"megalite-{each}-") for each in self.names) else []


def watched(
    tmp_path: Path, monkeypatch, queue: Queue, status: str | None, damage: str | None = None
) -> tuple[ClusterRunner, Trial, list[str]]:
    """A runner that has been given a trial, which trial that is, and which were launched.

    Args:
        damage: what its state holds instead.
    """
    config = write_run(tmp_path, parallel={"tp": 1})
    (trial,) = prepare(SweepConfig(config=config, dir=tmp_path / "sweep", space={"run.seed": [1]})).trials
    folder, launched = LaunchFolder(trial.folder.absolute()), list[str]()

    def launch(config, profile, num_nodes):
        launched.append(config.run.dir.name)
        folder.replace_state({"status": "submitted"})

    for name, value in (("Controller", queue), ("launch", launch), ("SECONDS_BETWEEN_LOOKS", 0.0)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "SECONDS_BETWEEN_QUESTIONS", 0.0)
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.1)
    if status is not None:
        say(trial, status)
    if damage is not None:
        folder.state.write_text(damage)
    runner = ClusterRunner(PROFILE, "loss", 1)
    runner.start(trial)
    return runner, trial, launched


def say(trial: Trial, status: str, **more: str) -> None:
    """What a supervisor says."""
    LaunchFolder(trial.folder.absolute()).write_state(status=status, **more)


def outcome_of(runner: ClusterRunner) -> TrialOutcome:
    """Of the one trial, once it is over."""
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        for _, outcome in runner.ended():
            assert runner.is_idle
            return outcome
        time.sleep(0.02)
    raise TimeoutError("the trial is waited for")


@pytest.mark.parametrize("status", ["submitted", "running", "waiting"])
def test_a_trial_whose_job_is_gone_is_launched_again(tmp_path, monkeypatch, status):
    """Its submission failed, or its supervisor died with the job; while it has jobs it is watched."""
    assert watched(tmp_path / "gone", monkeypatch, Queue(), status)[2] == ["trial-0001"]
    assert watched(tmp_path / "live", monkeypatch, Queue("trial-0001"), status)[2] == []


def test_a_job_that_vanishes_is_not_waited_for(tmp_path, monkeypatch):
    """Not at once, since what was said last may be seen late; nor while Slurm gives no answer. What the run's own files
    say counts, and else it goes on when the sweep is run again."""
    queue = Queue("trial-0001")
    runner, trial, _ = watched(tmp_path, monkeypatch, queue, "running")
    assert runner.ended() == []
    queue.names = []
    assert runner.ended() == []
    queue.names = None
    time.sleep(0.15)
    assert runner.ended() == []
    queue.names = []
    assert runner.ended() == []
    outcome = outcome_of(runner)
    assert outcome.state == "stopped"
    assert "no job of it is in the queue" in outcome.why
    shutil.copytree(make_run(tmp_path / "done", 6), trial.folder, dirs_exist_ok=True)
    runner.start(trial)
    assert outcome_of(runner).state == "done"


def test_a_damaged_state(tmp_path, monkeypatch):
    """Without a job the trial is launched again; with one it is watched, and what is damaged is named at its end."""
    assert watched(tmp_path / "gone", monkeypatch, Queue(), "running", damage="")[2] == ["trial-0001"]
    queue = Queue("trial-0001")
    runner, _, launched = watched(tmp_path / "live", monkeypatch, queue, "running", damage='{"stat')
    assert (launched, runner.ended()) == ([], [])
    queue.names = []
    outcome = outcome_of(runner)
    assert outcome.state == "stopped"
    assert "slurm/state.json: damaged" in outcome.why


def test_a_word_that_comes_late_counts(tmp_path, monkeypatch):
    """The job is gone, and then what its supervisor wrote is seen."""
    runner, trial, _ = watched(tmp_path, monkeypatch, Queue(), None)
    assert runner.ended() == []
    say(trial, "gave up", why="no restart helped")
    assert outcome_of(runner) == TrialOutcome("failed", why="no restart helped")


def test_a_trial_is_over_when_its_job_is(tmp_path, monkeypatch):
    """The next rung is launched in the same folder, and would be refused as live while the job is being ended."""
    queue = Queue("trial-0001")
    runner, trial, _ = watched(tmp_path, monkeypatch, queue, "running")
    shutil.copytree(make_run(tmp_path / "done", 6), trial.folder, dirs_exist_ok=True)
    say(trial, "finished")
    assert runner.ended() == []
    queue.names = []
    assert [outcome.state for _, outcome in runner.ended()] == ["done"]


def test_a_job_that_does_not_end_holds_nobody_up(tmp_path, monkeypatch):
    """On a dead node Slurm may go on ending it for hours; what came of the trial is known."""
    runner, trial, _ = watched(tmp_path, monkeypatch, Queue("trial-0001"), "running")
    shutil.copytree(make_run(tmp_path / "done", 6), trial.folder, dirs_exist_ok=True)
    say(trial, "finished")
    assert runner.ended() == []
    assert outcome_of(runner).state == "done"


def test_the_job_of_the_former_rung_is_still_being_ended(tmp_path, monkeypatch):
    """When the sweep is run again: it has no value of the next rung, and the trial goes on later; it has not failed."""
    queue = Queue("trial-0001")
    runner, trial, launched = watched(tmp_path, monkeypatch, queue, "finished")
    assert launched == []
    shutil.copytree(make_run(tmp_path / "done", 6), trial.folder, dirs_exist_ok=True)
    queue.names = []
    assert outcome_of(runner).state == "done"
    queue.names = ["trial-0001"]
    runner.start(replace(trial, steps=12))
    queue.names = []
    outcome = outcome_of(runner)
    assert (outcome.state, outcome.why) == ("stopped", "stands at step 6, and was to be judged at step 12")


def test_slurm_is_not_asked_all_the_time(tmp_path, monkeypatch):
    """A trial that says nothing of its end costs a question now and then."""
    queue = Queue("trial-0001")
    runner, _, _ = watched(tmp_path, monkeypatch, queue, "running")
    monkeypatch.setattr(module, "SECONDS_BETWEEN_QUESTIONS", 100.0)
    before = queue.num_questions
    for _ in range(5):
        runner.ended()
    assert queue.num_questions == before + 1


def test_jobs_are_submitted_watched_and_gathered(tmp_path: Path, monkeypatch):
    """So many at a time; one that gave up is a failed trial with its reason, one that cannot be launched too, and one
    whose jobs are live already is watched and not launched again."""
    config = write_run(tmp_path, parallel={"tp": 1})
    settings = SweepConfig(config=config, dir=tmp_path / "sweep", space={"run.seed": [1, 2, 3]})
    prepared = prepare(settings, has_device=False)
    launched: list[str] = []

    def launch(config, profile, num_nodes):
        launched.append(config.run.dir.name)
        if config.run.seed == 2:
            raise UserError("the queue is closed")
        LaunchFolder(config.run.dir.absolute()).write_state(status="gave up", why="a node is gone")

    queue = Queue("trial-0003")
    monkeypatch.setattr(module, "Controller", queue)
    monkeypatch.setattr(module, "launch", launch)
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LOOKS", 0.0)
    LaunchFolder(prepared.trials[2].folder.absolute()).write_state(status="running")
    runner = ClusterRunner(PROFILE, "validation", 1)

    def told(line: str) -> None:
        if line.startswith("trial 2"):  # the live one ends
            queue.names = []
            LaunchFolder(prepared.trials[2].folder.absolute()).write_state(status="gave up", why="no restart helped")

    book = SweepRun(prepared, runner, told).run()
    assert launched == ["trial-0001", "trial-0002"]
    assert [each.state for each in book.trials.values()] == ["failed"] * 3
    assert [book.trials[n].why for n in (1, 2, 3)] == ["a node is gone", "the queue is closed", "no restart helped"]


def test_a_trial_that_does_not_fit_the_cluster(tmp_path: Path):
    """Is told before anything is submitted."""
    config = write_run(tmp_path, parallel={"tp": 1})
    settings = SweepConfig(config=config, dir=tmp_path / "sweep", space={"run.seed": [1, 2]})
    runner = ClusterRunner(
        ClusterConfig(name="pretended", gpus_per_node=0, ranks_per_node=1, time_limit="1:00"), "validation", 1
    )
    with pytest.raises(UserError, match="time_limit"):
        runner.check(list(prepare(settings, has_device=False).trials))
