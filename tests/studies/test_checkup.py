"""`megalite doctor CONFIG`: each look finds what is planted, and a sound run has nothing against it."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from megalite.config.load import load_config
from megalite.config.schema import Config
from megalite.errors import EXIT_DONE, EXIT_FAULT, EXIT_INTERRUPTED, UserError
from megalite.studies import checkup
from megalite.studies.aside import aside
from megalite.studies.checkup import Look, check_up
from megalite.studies.probe import probe
from megalite.studies.probe_report import ProbeReport
from megalite.studies.verify_resume import Report, ResumeFinding
from megalite.train.place import Place
from tests.kit.runs import COMMAND, megalite, write_run
from tests.kit.spawn import run_ranks

SOUND = ProbeReport(
    loss=4.62,
    grad_norm=0.7,
    vocab_size=101,
    logit_variance=0.01,
    origin="fresh weights, seed 1",
    is_fresh=True,
    num_weights=21,
    silent=[],
    seconds=0.5,
    overfit=[4.6, 3.0, 1.0],
)


def looks(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *overrides: str, alone: float = 4.62, **seen: Any
) -> dict[str, Look]:
    """What is said of a run whose probe has seen something, by what is looked at."""
    exact = Report(3, [ResumeFinding("loss", "", "")])
    monkeypatch.setattr(checkup, "verify_resume", lambda *args: exact)
    report = ProbeReport(**{**vars(SOUND), **seen})

    def pretend(config: Config, world_size: int, overfit_steps: int) -> ProbeReport:
        return report if overfit_steps else ProbeReport(**{**vars(SOUND), "loss": alone})

    path = write_run(folder)
    return {look.what: look for look in check_up(path, overrides, probe=pretend)}


def test_sound(monkeypatch, tmp_path):
    """Nothing is bad; what cannot be told says why."""
    found = looks(monkeypatch, tmp_path)
    assert [look.is_good for look in found.values()] == [None, True, True, True, True, True, None]
    assert "no such folder" in found["data is text"].found
    assert "monitor.machine" in found["speed"].advice


PLANTED = {
    "first loss": ({"loss": 5.4}, "5.400, log V is 4.615"),
    "first loss ": ({"loss": 3.9}, "3.900, log V is 4.615"),
    "first loss  ": ({"loss": 4.5, "is_fresh": False, "origin": "weights of x"}, "4.500, log V is 4.615, weights of x"),
    "every weight learns": ({"silent": ["a", "b.experts.0"]}, "no gradient: a"),
    "overfits one batch": ({"overfit": [4.6, 4.0]}, "4.600 -> 4.000 in 2 steps at lr=0.0003"),
}


@pytest.mark.parametrize("what", PLANTED)
def test_planted(monkeypatch, tmp_path, what):
    """Each is bad alone, and says what to do."""
    seen, words = PLANTED[what]
    found = looks(monkeypatch, tmp_path, alone=seen.get("loss", 4.62), **seen)
    assert [look.what for look in found.values() if look.is_good is False] == [what.strip()]
    assert found[what.strip()].found == words
    assert found[what.strip()].advice


def test_experts_without_tokens_are_no_fault(monkeypatch, tmp_path):
    found = looks(monkeypatch, tmp_path, silent=["blocks.0.mlp.experts.3.up.weight"])
    assert found["every weight learns"].is_good is None


def test_a_loss_that_hangs_on_the_layout(monkeypatch, tmp_path):
    """Further off than sums in another order."""
    found = looks(monkeypatch, tmp_path, alone=4.625)["same loss in another layout"]
    assert (found.is_good, found.found) == (False, "4.62 and 4.625 on one rank")


def test_a_restart_that_is_not_exact(monkeypatch, tmp_path):
    looks(monkeypatch, tmp_path)
    wrong = Report(3, [ResumeFinding("loss", "", "step 4: 1.0 and 1.1")])
    monkeypatch.setattr(checkup, "verify_resume", lambda *args: wrong)
    found = checkup._restart(tmp_path / "config.yaml", ())
    assert (found.is_good, found.advice) == (False, "loss differ; docs/checkpoints.md")

    def refuse(*args: Any) -> Report:
        raise UserError("the run has 5 steps")

    monkeypatch.setattr(checkup, "verify_resume", refuse)
    assert checkup._restart(tmp_path / "config.yaml", ()).is_good is None


def probed(path: Path, out: Path) -> None:
    import torch.distributed as dist

    config = load_config(path)
    place = Place(dist.get_rank(), dist.get_world_size(), dist.get_rank(), "")
    assert probe(aside(config, out.parent / "aside"), place, out, 12) == EXIT_DONE


def test_a_probe_of_real_ranks(tmp_path):
    """Loss near log V, a gradient of every weight but frozen ones, a batch that is learnt; the folder stays empty."""
    frozen = {"groups": [{"match": "blocks.0.mlp.*", "frozen": True}], "lr": 1e-2}
    path = write_run(tmp_path, parallel={"tp": 2}, optimizer=frozen)
    run_ranks(probed, 2, path, tmp_path / "probe.json")
    found = ProbeReport(**json.loads((tmp_path / "probe.json").read_text()))
    assert abs(found.loss - math.log(found.vocab_size)) < 0.1
    assert (found.silent, found.is_fresh, len(found.overfit)) == ([], True, 12)
    assert found.overfit[-1] < found.overfit[0] - 0.3
    assert found.seconds > 0.0
    assert not (tmp_path / "run").exists()


def test_the_command(tmp_path):
    """A run that cannot learn at its rate is bad: exit code 1, one line to stderr; a wrong config is told first.
    Runs that are restarted say nothing."""
    path = write_run(tmp_path, parallel={"tp": 1}, optimizer={"lr": 1e-9}, train={"steps": 8})
    done = megalite("doctor", path, "--overfit-steps", "4")
    assert done.returncode == EXIT_FAULT, done.stderr
    assert "look at this before you train: overfits one batch" in done.stderr
    assert "exact: 6 steps" in " ".join(done.stdout.split())
    assert "the first step" not in done.stdout + done.stderr
    assert megalite("doctor", path, "train.steps=0").returncode == 2


@pytest.mark.parametrize("seconds", [1.0, 9.0])
def test_ctrl_c_is_an_end_in_words(tmp_path, seconds):
    """While ranks start, and while they train: one line, the code of an interruption, and no folder."""
    path = write_run(tmp_path, parallel={"tp": 1}, optimizer={"lr": 1e-9}, train={"steps": 8})
    command = [*COMMAND, "doctor", str(path), "--overfit-steps", "100000"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(seconds)
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=60)
    assert child.returncode in (EXIT_INTERRUPTED, -signal.SIGINT), said  # a shell says 130 of either
    assert "megalite: interrupted; run the same command again to go on" in said
    assert "Traceback" not in said, said
    assert not (tmp_path / "run").exists()
