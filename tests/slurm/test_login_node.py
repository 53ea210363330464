"""A login node knows nothing of the nodes' devices: what needs one is launched from it, and judged on the nodes."""

from __future__ import annotations

import json

import pytest

from megalite.config.load import load_config
from megalite.errors import DataError, UserError
from megalite.slurm import health_check, launch, node_check
from megalite.slurm.cluster import ClusterConfig
from megalite.slurm.folder import LaunchFolder
from tests.kit.runs import write_run

FP8 = {
    "precision": {"dtype": "bf16", "fp8": {"backend": "scaled_mm", "recipe": "current"}},
    "train": {"device": "cuda"},
    "parallel": {"tp": 1, "dp": 1, "zero_stage": 1},
}


class Slurm:
    """A controller that takes every job."""

    def live_jobs(self, name: str) -> list[str]:
        return []

    def submit(self, script: str, *options: str) -> str:
        return "7"


@pytest.fixture
def fp8_run(tmp_path):
    """A run that needs a GPU, which this machine is taken not to have."""
    return load_config(write_run(tmp_path, **FP8))


def test_fp8_is_launched_where_there_is_no_gpu(fp8_run, monkeypatch):
    """It was refused for the login node's device."""
    monkeypatch.setattr(launch, "Controller", Slurm)
    monkeypatch.setattr(launch, "check_cluster", lambda cluster, num_nodes: None)
    _, job = launch.launch(fp8_run, ClusterConfig(gpus_per_node=1))
    assert job == "7"
    assert LaunchFolder(fp8_run.run.dir.absolute()).read_state()["status"] == "submitted"


@pytest.mark.parametrize("former", [{}, {"status": "gave up", "why": "no restart helped", "job": "6", "time": 1.5}])
def test_what_could_not_be_submitted_is_not_waited_for(fp8_run, monkeypatch, former):
    """The state of the run is what it was: none, or how its former launch has ended."""

    class Refuses(Slurm):
        def submit(self, script: str, *options: str) -> str:
            raise UserError("sbatch refused: Invalid account")

    monkeypatch.setattr(launch, "Controller", Refuses)
    monkeypatch.setattr(launch, "check_cluster", lambda cluster, num_nodes: None)
    folder = LaunchFolder(fp8_run.run.dir.absolute())
    folder.replace_state(former)
    with pytest.raises(UserError, match="Invalid account"):
        launch.launch(fp8_run, ClusterConfig(gpus_per_node=1))
    assert folder.read_state() == former
    assert folder.state.exists() == bool(former)


@pytest.mark.parametrize("state", ["", '{"status": "runn', "[]", "[" * 10**5, "\x00" * 40])
def test_a_damaged_state_keeps_no_run_from_being_launched(fp8_run, monkeypatch, state):
    """No job of it is live: it begins with a state of its own, and with none where it is not submitted."""
    monkeypatch.setattr(launch, "Controller", Slurm)
    monkeypatch.setattr(launch, "check_cluster", lambda cluster, num_nodes: None)
    folder = LaunchFolder(fp8_run.run.dir.absolute())
    folder.path.mkdir(parents=True)
    folder.state.write_text(state)
    with pytest.raises(DataError, match=r"state\.json: damaged"):
        folder.read_state()
    launch.launch(fp8_run, ClusterConfig(gpus_per_node=1))
    assert (folder.read_state()["status"], folder.read_state()["job"]) == ("submitted", "7")


def test_nodes_that_cannot_run_it_say_so(fp8_run, monkeypatch, tmp_path):
    """By the check before the first attempt: the config is refused when all say the same, and else the one node."""

    def no_gpu(config) -> None:
        raise UserError("train.device=cuda, but torch finds no CUDA device here")

    monkeypatch.setattr(node_check, "check_device", no_gpu)
    folder = LaunchFolder(fp8_run.run.dir)
    folder.path.mkdir(parents=True)
    folder.config.write_text(json.dumps(fp8_run.model_dump(mode="json")))
    refusal = node_check._refusal(folder.run_dir)
    assert refusal == "train.device=cuda, but torch finds no CUDA device here"
    speeds = {
        "num_gpus": 1,
        "memory_gb": 80.0,
        "gflops": 700.0,
        "disk_mb_per_second": 900.0,
        "clock_error_seconds": 0.1,
    }
    for others, expected in ((refusal, (refusal, {"a", "b"})), ("", ("", {"b"}))):
        for node, said in (("a", others), ("b", refusal)):
            (tmp_path / f"{node}.json").write_text(json.dumps({"node": node, **speeds, "refusal": said}))
        result = health_check._evaluate(tmp_path, ("a", "b"), 1)
        assert (result.refusal, set(result.unhealthy)) == expected
