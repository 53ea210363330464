"""The walks of docs/plan.md show what their commands print."""

from __future__ import annotations

import re

import pytest

from megalite.cli.main import main
from tests.kit.paths import ROOT

PAGE = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"^\$ megalite (plan configs/\S+ .*)\n((?:(?!```|\$ ).*\n)+)", PAGE, re.MULTILINE)
NOT_SHOWN = "hours are those of training steps"


def test_there_are_four_walks():
    """Each of the sizes has a command with what it prints, and two of them what does not fit."""
    configs = [command.split()[1] for command, _ in SHOWN]
    assert {f"configs/llama-{size}.yaml" for size in ("1b3", "8b", "70b", "1t")} <= set(configs)
    assert sum("no layout fits" in printed for _, printed in SHOWN) == 2


@pytest.mark.parametrize(("command", "printed"), SHOWN, ids=[command[5:60] for command, _ in SHOWN])
def test_a_walk_prints_what_stands_there(
    command: str, printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit):
        main(command.split())
    said = "".join(capsys.readouterr())
    lines = [line.rstrip() for line in said.splitlines() if line.strip() and not line.startswith(NOT_SHOWN)]
    assert printed.splitlines() == lines
