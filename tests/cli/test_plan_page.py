"""The walks of docs/plan.md show what their commands print."""

from __future__ import annotations

import pytest

from tests.kit.walks import printed, shown

SHOWN = shown()


def test_there_are_four_walks():
    """Each of the sizes has a command with what it prints, and two of them what does not fit."""
    configs = [command.split()[1] for command, _ in SHOWN]
    assert {f"configs/llama-{size}.yaml" for size in ("1b3", "8b", "70b", "1t")} <= set(configs)
    assert sum("no layout fits" in text for _, text in SHOWN) == 2


@pytest.mark.parametrize(("command", "text"), SHOWN, ids=[command[5:60] for command, _ in SHOWN])
def test_a_walk_prints_what_stands_there(command: str, text: str):
    assert printed(command).splitlines() == text.splitlines(), "run: python -m tests.kit.walks"
