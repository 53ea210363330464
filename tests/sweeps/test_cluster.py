"""Trials as Slurm runs, where `megalite launch` is pretended: what is submitted, watched and gathered."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalite.errors import UserError
from megalite.slurm.cluster import ClusterConfig
from megalite.slurm.folder import LaunchFolder
from megalite.sweeps import cluster as module
from megalite.sweeps.cluster import ClusterRunner
from megalite.sweeps.settings import SweepConfig
from megalite.sweeps.sweep import SweepRun, prepare
from tests.kit.runs import write_run


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

    monkeypatch.setattr(module, "launch", launch)
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LOOKS", 0.0)
    LaunchFolder(prepared.trials[2].folder.absolute()).write_state(status="running")
    runner = ClusterRunner(ClusterConfig(name="pretended", gpus_per_node=0, ranks_per_node=1), "validation", 1)

    def told(line: str) -> None:
        if line.startswith("trial 2"):  # the live one ends
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
