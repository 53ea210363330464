"""Ranks that somebody else has started with different runs: refused by all of them, with what differs."""

from __future__ import annotations

import socket
import subprocess

from megalite.errors import EXIT_BAD_INPUT
from tests.kit.preloaded import preloaded
from tests.kit.runs import COMMAND, clean_environment, write_run

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


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])
