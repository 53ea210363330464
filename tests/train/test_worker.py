"""A rank learns who it is from whoever started it."""

from __future__ import annotations

import errno
import os

import pytest

from megalite.errors import EXIT_BAD_INPUT, EXIT_FAULT, UserError
from megalite.train import worker
from megalite.train.failures import error_path, read_error
from megalite.train.place import MPI_VARIABLES, RENDEZVOUS_VARIABLE, Place, given_place
from tests.kit.runs import megalite, write_run

NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    RENDEZVOUS_VARIABLE,
)
SLURM = ("SLURM_PROCID", "SLURM_STEP_ID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_LAUNCH_NODE_IPADDR", "SLURM_JOB_ID")


@pytest.fixture(autouse=True)
def nobody(monkeypatch):
    """An environment in which nobody has started a rank."""
    for name in (*NAMES, *SLURM, *(name for names in MPI_VARIABLES for name in names)):
        monkeypatch.delenv(name, raising=False)


def given(monkeypatch, **env: str) -> Place | None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    return given_place()


def test_nobody():
    """Without a launcher `megalite train` starts the ranks itself."""
    assert given_place() is None


def test_torchrun(monkeypatch):
    """torchrun's variables."""
    place = given(monkeypatch, RANK="3", WORLD_SIZE="8", LOCAL_RANK="1", MASTER_ADDR="node1", MASTER_PORT="29500")
    assert place == Place(3, 8, 1, "tcp://node1:29500")


def test_srun(monkeypatch):
    """Slurm's variables: the port follows from the job, so that two jobs on a node do not meet."""
    env = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"}
    place = given(monkeypatch, **env, SLURM_LAUNCH_NODE_IPADDR="10.0.0.1", SLURM_JOB_ID="123456")
    assert place == Place(5, 8, 1, "tcp://10.0.0.1:23456")


@pytest.mark.parametrize("names", MPI_VARIABLES, ids=["Open MPI", "MVAPICH", "MPICH"])
def test_mpirun(monkeypatch, names):
    """The variables of three kinds of mpirun; where ranks meet is said by MASTER_ADDR and MASTER_PORT."""
    env = dict(zip(names, ("5", "8", "1", "4"), strict=True))
    place = given(monkeypatch, **env, MASTER_ADDR="node1", MASTER_PORT="29500")
    assert place == Place(5, 8, 1, "tcp://node1:29500", local_world_size=4)
    assert place.local_ranks == range(4, 8)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "65536"}, "MASTER_PORT: found 65536 in the environment"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK: found 'one' in the environment, expected a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "-1"}, "WORLD_SIZE: found '-1'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2, WORLD_SIZE=2, LOCAL_RANK=0: ranks count from 0"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK=1"),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "http"}, "MASTER_PORT: found 'http'"),
    ],
)
def test_variables_that_make_no_sense(monkeypatch, env, message):
    """What somebody left in the environment is named, and how to get rid of it."""
    with pytest.raises(UserError, match=message):
        given(monkeypatch, **env)


def test_batch_script_is_not_a_rank(monkeypatch):
    """Inside an allocation but outside a step, as in a batch script, there is no rank to be."""
    assert given(monkeypatch, SLURM_JOB_ID="7", SLURM_NTASKS="8", SLURM_PROCID="0") is None


def test_local_ranks(monkeypatch):
    """Ranks of one machine meet through a file."""
    env = {RENDEZVOUS_VARIABLE: "file:///tmp/x/rendezvous"}
    place = given(monkeypatch, RANK="0", WORLD_SIZE="2", **env)
    assert place == Place(0, 2, 0, "file:///tmp/x/rendezvous")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told_in_words(tmp_path, number):
    """Whoever finds it full, be it a library: not where in the code that was, but what to do."""

    def write() -> int:
        raise OSError(number, os.strerror(number))

    assert worker.run_guarded(tmp_path, Place(0, 1, 0, ""), write) == EXIT_FAULT
    message = read_error(error_path(tmp_path, 0))["message"]
    assert message.startswith(f"[Errno {number}] ")
    assert f"run.dir={tmp_path}; make room and start again" in message


def test_records_of_micro_batches_need_a_gpu(tmp_path):
    """Said by the run, where the config leaves the device open; no step is done."""
    config = write_run(tmp_path)
    outcome = megalite("train", config, "train.cuda_graphs=true", "train.device=auto", "precision.dtype=bf16")
    assert outcome.returncode == EXIT_BAD_INPUT, outcome.stderr
    assert "train.cuda_graphs: it is for GPUs, and this run is on the CPU; use false" in outcome.stderr
    assert "step 1/" not in outcome.stdout + outcome.stderr
