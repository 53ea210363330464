"""Ranks that somebody else has started with different runs: refused by all of them, with what differs. On unlike
machines: said, and refused where ranks must compute alike."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import torch

from megalite.config.load import load_config
from megalite.errors import EXIT_BAD_INPUT, EXIT_DONE
from megalite.train import device
from megalite.train.failures import error_path
from tests.kit.preloaded import preloaded
from tests.kit.runs import COMMAND, clean_environment, events, write_run
from tests.train.forked import launch

TIMEOUT_SECONDS = 120.0


def test_ranks_with_other_configs_or_schedules_say_so(tmp_path):
    """A pipeline's schedule is compared by what stands in it. None of them leaves anything in the run's folder."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "theirs").mkdir()
    for where, order in (("mine", "0F0,0F1,0B0,0B1"), ("theirs", "0F0,0F1,0B1,0B0")):
        (tmp_path / where / "own.csv").write_text(f"{order}\n1F0,1F1,1B0,1B1\n")
    parallel = {"pp": 2, "tp": 1, "schedule": "own.csv"}
    config = write_run(tmp_path, parallel=parallel, batch={"micro_batch_size": 1, "global_batch_size": 2})
    cases = {
        "train.steps: 7 and 8": (["train.steps=7"], ["train.steps=8"]),
        'own_schedule of the plan: ["0F0,0F1,0B0,0B1", "1F0,1F1,1B0,1B1"] and ["0F0,0F1,0B1,0B0", "1F0,': ([], []),
    }
    for difference, overrides in cases.items():
        port = free_port()
        ranks = [
            subprocess.Popen(
                [*COMMAND, "train", str(config), *given],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=tmp_path / where,
                env=preloaded({**clean_environment(), "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": port}),
            )
            for rank, (where, given) in enumerate(zip(("mine", "theirs"), overrides, strict=True))
        ]
        for rank in ranks:
            said = rank.communicate(timeout=TIMEOUT_SECONDS)[0]
            assert rank.returncode == EXIT_BAD_INPUT, said
            assert "ranks have not the same run: rank 0 on " in said
            assert difference in said
        assert not (tmp_path / "run" / "config.yaml").exists()


def on_unlike_cpus() -> None:
    """Rank 0 computes on a Zen 4, rank 1 on a Zen 5."""
    kind = f"zen{4 + torch.distributed.get_rank()}"
    device.cpu_class = lambda: kind


def on_zen5() -> None:
    device.cpu_class = lambda: "zen5"


def test_unlike_machines_of_replicas_are_said(tmp_path: Path):
    """By an event and on the screen, and so is a run that goes on elsewhere; where all is as it was, nothing is."""
    zen4, zen5 = (f"CPU {name}, products of fp32 by torch's BLAS" for name in ("zen4", "zen5"))
    told = []
    for steps, prepare in enumerate((on_unlike_cpus, on_zen5, on_zen5), 1):
        sections = {"train": {"steps": steps, "eval_every": None}, "monitor": {"tensorboard": False}}
        path = write_run(tmp_path, parallel={"tp": 1, "dp": 2}, schedule={"warmup_steps": 0}, **sections)
        assert launch(load_config(path), 2, prepare=prepare) == EXIT_DONE
        told.append({each["event"]: each for each in events(tmp_path / "run") if each["step"] == steps - 1})
    first, second, third = told
    assert [each["start"]["machines"] for each in told] == [{zen4: 1, zen5: 1}, {zen5: 2}, {zen5: 2}]
    here = socket.gethostname()
    assert f"unlike kind: rank 0 on {here} has {zen4}, rank 1 on {here} {zen5}" in first["machines_differ"]["why"]
    assert f"goes on with 2 x {zen5}, it had 1 x {zen4}; 1 x {zen5} before" in second["machines_changed"]["why"]
    assert "machines_changed" not in first | third
    assert "machines_differ" not in second | third


def test_unlike_machines_of_a_tensor_parallel_group_are_refused(tmp_path: Path):
    """By all ranks, before anything is built: each computes norms and choices of experts by itself."""
    config = load_config(write_run(tmp_path, parallel={"tp": 2}))
    assert launch(config, 2, prepare=on_unlike_cpus) == EXIT_BAD_INPUT
    host = socket.gethostname()
    said = [error_path(tmp_path / "run", rank).read_text() for rank in range(2)]
    assert all(f"rank 0 on {host} has CPU zen4, rank 1 on {host} CPU zen5; start each group" in each for each in said)
    assert not (tmp_path / "run" / "config.yaml").exists()


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])
