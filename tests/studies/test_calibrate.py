"""This machine as a file for the planner."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megalite.cli.main import main
from megalite.errors import EXIT_BAD_INPUT, EXIT_DONE
from megalite.planner.machines import load_machine
from megalite.studies.calibrate import allocator_of_training
from megalite.train.fork_server import RANK_MEMORY

ROOT = Path(__file__).parents[2]
TINY = (
    str(ROOT / "configs" / "debug.yaml"),
    *("train.device=cpu", "model.hidden_size=64", "model.num_heads=2", "model.num_kv_heads=2"),
    *("model.ffn_hidden_size=128", "batch.seq_len=64", "batch.micro_batch_size=2"),
)


def test_a_machine_is_measured(tmp_path: Path):
    """Two ranks: a file that loads, with rates that a computer can have, and a source for each number."""
    out = tmp_path / "mine.yaml"
    with pytest.raises(SystemExit) as ended:
        main(["plan", "calibrate", *TINY, "--ranks", "2", "--out", str(out)])
    assert ended.value.code == EXIT_DONE
    found = load_machine(str(out))
    assert found.ranks_per_node == 2
    assert 1e9 < found.flops["fp32"] < 1e14
    assert 1e8 < found.memory_bandwidth < 1e13
    assert 1e6 < found.link < 1e12
    assert 0.0 < found.constants.products <= 1.0
    assert found.meeting is None or found.constants.overhead < found.meeting < 1.0
    assert 0.0 < found.constants.overhead < 1.0  # beside other work, what blocks take may be lost in it
    assert all("calibrate" in source or "not measured" in source for source in found.sources.values())


def test_ranks_keep_freed_memory_as_those_of_training(monkeypatch: pytest.MonkeyPatch):
    """Processes started meanwhile have the allocator's settings; what the user has set stays, and afterwards all is as
    before."""
    for name in RANK_MEMORY:
        monkeypatch.delenv(name, raising=False)
    own, *others = RANK_MEMORY
    monkeypatch.setenv(own, "12345")
    before = dict(os.environ)
    with allocator_of_training():
        asked = [sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"]
        seen = json.loads(subprocess.check_output(asked, text=True))
    assert seen[own] == "12345"
    assert {name: seen[name] for name in others} == {name: RANK_MEMORY[name] for name in others}
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("model.moe={num_experts: 4}", "give a config of a dense model"),
        ("precision.dtype=fp16", "precision.dtype"),
    ],
)
def test_refused(tmp_path: Path, capsys: pytest.CaptureFixture, setting: str, sentence: str):
    """Before anything is measured or written."""
    with pytest.raises(SystemExit) as ended:
        main(["plan", "calibrate", *TINY, setting, "--out", str(tmp_path / "x.yaml")])
    assert ended.value.code == EXIT_BAD_INPUT
    assert sentence in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
