"""The way to the first step: spoken, ended at once by a signal, and never a claim to a folder."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megalite.errors import EXIT_BAD_INPUT, EXIT_FAULT, EXIT_REQUEUE
from megalite.train import local
from megalite.train.failures import leave_error
from tests.kit.runs import COMMAND, clean_environment, megalite, write_run

TIMEOUT_SECONDS = 120.0

ALONE = """
import sys
from megalite.parallel import rendezvous
rendezvous.FIRST_WORD_SECONDS, rendezvous.TIMEOUT_SECONDS = 0.5, float(sys.argv.pop(1))
rendezvous.open_store.__kwdefaults__["timeout_seconds"] = rendezvous.TIMEOUT_SECONDS
from megalite.cli.main import main
main()
"""


def alone(patience: float, *arguments: str) -> subprocess.Popen:
    """Rank 0 of two, whose other never comes."""
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "0", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        [sys.executable, "-c", ALONE, str(patience), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**clean_environment(), **place},
    )


def test_a_rank_that_waits_for_others_says_so_and_hears_signals(tmp_path):
    """Rank 0 without rank 1: every phase is told, the missing rank is named while it waits, and a signal ends it at
    once, although the process sits in torch; nothing in the folder keeps the next command from running there."""
    config = write_run(tmp_path)
    rank = alone(100.0, "train", str(config))
    lines = []
    for line in rank.stdout:
        lines.append(line)
        if "waiting for" in line:
            break
    rank.send_signal(signal.SIGTERM)
    began = time.monotonic()
    rest = rank.communicate(timeout=TIMEOUT_SECONDS)[0]
    assert time.monotonic() - began < 5
    assert rank.returncode == EXIT_REQUEUE
    assert "stopped before the first step" in rest
    said = "".join(lines)
    assert "waiting for 1 of 2 ranks: 1" in said
    assert said.index("importing PyTorch") < said.index("meeting the other ranks") < said.index("waiting for")


def test_ranks_that_never_come_end_the_wait(tmp_path):
    """With the missing one named, without a traceback, and not as bad input: a launcher may try again."""
    rank = alone(1.0, "train", str(write_run(tmp_path)))
    said = rank.communicate(timeout=TIMEOUT_SECONDS)[0]
    assert rank.returncode == EXIT_FAULT
    assert "there was no sign of 1 of 2 ranks: 1" in said
    assert "unset RANK and WORLD_SIZE" in said
    assert "Traceback" not in said


def test_a_refused_start_leaves_the_folder_free(tmp_path):
    """A start that ends before its first step, then one with another model: nobody calls it another run. A run that has
    done a step keeps its folder."""
    config = write_run(tmp_path, parallel={"tp": 1}, train={"steps": 1}, schedule={"warmup_steps": 0})
    bad = tmp_path / "model"
    bad.mkdir()
    (bad / "config.json").write_text("{}")
    refused = megalite("train", config, f"train.init_from={bad}")
    assert refused.returncode == EXIT_BAD_INPUT
    assert (tmp_path / "run/config.yaml").is_file(), "it got as far as ranks of its own"
    done = megalite("train", config, "model.num_layers=1")
    assert done.returncode == 0, done.stderr
    for phase in ("starting 1 rank on this machine", "importing PyTorch", "building the model", "the first step"):
        assert phase in done.stdout
    other = megalite("train", config)
    assert other.returncode == EXIT_BAD_INPUT
    assert "holds another run" in other.stderr


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("a file", "run"),
        ("below a file", "run"),
        ("a link to nothing", "run"),
        ("of the system", "run"),
        ("its checkpoints are a file", "run/checkpoints"),
        ("its checkpoints are elsewhere", "run/checkpoints"),
        ("its logs are a file", "run/logs"),
        ("a log is a folder", "run/logs"),
    ],
)
def test_a_folder_that_cannot_be_written_is_refused(tmp_path, kind, named):
    """In words, before a rank starts."""
    base = Path("/proc") if kind == "of the system" else tmp_path / "file" if kind == "below a file" else tmp_path
    run, sections = base / "run", {"parallel": {"tp": 2}}
    (tmp_path / "file").write_text("of somebody")
    if kind.startswith("its"):
        run.mkdir()
    if kind == "a log is a folder":
        (run / "logs" / "rank-1.log").mkdir(parents=True)
    elif kind.endswith("a file") and kind != "below a file":
        (base / named).write_text("of somebody")
    elif kind in ("a link to nothing", "its checkpoints are elsewhere"):
        (base / named).symlink_to(tmp_path / "nothing")
    refused = megalite("train", write_run(tmp_path, run={"dir": str(run)}, **sections))
    assert refused.returncode == EXIT_BAD_INPUT, refused.stderr
    assert re.search(rf"{base / named}:? cannot be written", refused.stderr)
    assert "Traceback" not in refused.stderr


def test_deepspeed_is_imported_by_its_own_engine_alone(tmp_path):
    """It is half a second of a start."""
    imports = {**clean_environment(), "PYTHONPROFILEIMPORTTIME": "1"}
    for engine, is_imported in (("native", False), ("fsdp2", False), ("deepspeed", True)):
        stage = 3 if engine == "fsdp2" else 1
        sections = {
            "parallel": {"tp": 1, "engine": engine, "zero_stage": stage},
            "train": {"steps": 1, "compile": "off"},
            "schedule": {"warmup_steps": 0},
        }
        command = [*COMMAND, "train", str(write_run(tmp_path / engine, **sections))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, env=imports, check=True)
        assert bool(re.search(r"\| +deepspeed$", done.stderr, re.MULTILINE)) == is_imported, engine


def test_too_much_for_this_machine_is_refused_before_a_rank_starts(tmp_path):
    """What would end in the kernel's killing a rank ends in words instead."""
    config = write_run(tmp_path, parallel={"tp": 1})
    began = time.monotonic()
    huge = ("batch.micro_batch_size=4000000", "batch.global_batch_size=4000000")
    done = megalite("train", config, *huge)
    assert done.returncode == EXIT_BAD_INPUT
    assert "GiB are available" in done.stderr
    assert "batch.micro_batch_size=" in done.stderr
    assert time.monotonic() - began < 30
    assert not (tmp_path / "run").exists()
    checked = megalite("config", "check", config, "--vocab-size", "1000", *huge)
    assert checked.returncode == 0
    assert "not on this machine" in checked.stdout


@pytest.mark.parametrize("has_run_out", [True, False])
def test_a_rank_that_the_kernel_killed_is_named_as_such(has_run_out, tmp_path, capfd):
    """SIGKILL while the kernel counts a kill for memory, and SIGKILL by somebody."""
    code = local._verdict(tmp_path, [-signal.SIGKILL, 1], is_out_of_memory=has_run_out)
    assert code == EXIT_FAULT
    said = capfd.readouterr().err
    assert "rank 0 ended with SIGKILL" in said
    assert ("memory ran out" in said) == has_run_out


@pytest.mark.parametrize(
    ("message", "when"), [("Connection reset by peer", "then failed"), ("no such key", "failed first")]
)
def test_who_only_lost_another_rank_has_not_failed_first(tmp_path, capfd, message, when):
    leave_error(tmp_path, 1, {"rank": 1, "attempt": 1, "time": 0.0, "is_user_error": False, "message": message})
    local._verdict(tmp_path, [-signal.SIGKILL, 1], is_out_of_memory=False)
    assert f"rank 1 {when}:\n{message}" in capfd.readouterr().err
