"""Whole runs through the command line, as a user starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import yaml

from tests.kit.data import VOCAB_SIZE, random_documents, write_packed_folder
from tests.kit.preloaded import hook, preloaded

COMMAND = (sys.executable, "-m", "megalite")
RUN_TIMEOUT_SECONDS = 240.0


def write_run(folder: Path, **sections: dict) -> Path:
    """A config for a tiny run over a tiny packed data set, both below `folder`; returns the config's path."""
    folder.mkdir(parents=True, exist_ok=True)
    packed = folder / "packed"
    if not packed.exists():
        write_packed_folder(packed, random_documents(400, longest=40), seq_len=32)
    config = {
        "run": {"dir": str(folder / "run")},
        "model": {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "ffn_hidden_size": 64, "vocab_size": VOCAB_SIZE},
        "parallel": {"tp": 2, "zero_stage": 1},
        "batch": {"micro_batch_size": 2, "global_batch_size": 4, "seq_len": 32},
        "data": {"train": [{"path": str(packed)}], "valid": [{"path": str(packed)}]},
        "precision": {"dtype": "fp32"},
        "schedule": {"warmup_steps": 2},
        "train": {"steps": 6, "eval_batches": 2, "device": "cpu"},
        "monitor": {"log_every": 1},
    }
    for name, values in sections.items():
        config[name] = {**config.get(name, {}), **values}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def megalite(*arguments: str | Path, timeout: float = RUN_TIMEOUT_SECONDS, **options) -> subprocess.CompletedProcess:
    """Run a command to its end and capture what it says. It and its ranks begin with everything imported."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=preloaded(clean_environment()),
        **options,
    )


def start(*arguments: str | Path, is_fresh: bool = False, processes: Path | None = None) -> subprocess.Popen:
    """Start a command and leave it running; the caller ends it.

    Args:
        is_fresh: everything is imported anew, for tests of what happens meanwhile.
        processes: a folder in which each rank leaves its process number, in `rank-RANK`.
    """
    environment = clean_environment()
    if processes is not None:
        environment[hook().PROCESSES_VARIABLE] = str(processes)
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment if is_fresh else preloaded(environment, with_command=False),
    )


def clean_environment() -> dict[str, str]:
    """The environment without what this test process set for its own ranks."""
    dropped = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "DS_ACCELERATOR", "MASTER_ADDR", "MASTER_PORT")
    dropped += ("GLOO_SOCKET_IFNAME", "CUBLAS_WORKSPACE_CONFIG")
    return {name: value for name, value in os.environ.items() if name not in dropped}


def metrics(run_dir: Path) -> list[dict]:
    """The run's metrics, one record a step."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def events(run_dir: Path) -> list[dict]:
    """The run's events."""
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


def wait_for_step(run_dir: Path, step: int, process: subprocess.Popen, timeout: float = RUN_TIMEOUT_SECONDS) -> None:
    """Wait until the run has recorded a step."""
    path = run_dir / "metrics.jsonl"
    wait_until(
        lambda: path.exists() and any(record["step"] >= step for record in metrics(run_dir)),
        f"step {step}",
        process,
        timeout,
    )


def wait_until(
    is_so: Callable[[], bool], what: str, process: subprocess.Popen, timeout: float = RUN_TIMEOUT_SECONDS
) -> None:
    """Wait for something that a run does; `what` names it where it does not come."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if is_so():
            return
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.02)
    raise TimeoutError(f"{what} was not reached in {timeout} s")
