"""Any words behind any command: help, or a refusal in words with exit code 2; nothing is begun and nothing written.

No path that is given leads to anything that could be worked on, so a command that ends with 0 had nothing to do.
"""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from megalite.cli import main
from megalite.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAULT
from tests.fuzz.kit import survive

WORDS = (
    *("", " ", "x", "0", "1", "-1", "1e9", "0x10", "9" * 400, "nan", "null", "true", "a=b", "train.steps=1", "=", "a."),
    *("[1,", "{", "@", "--", "-", "---", "-x", "--no-such-option", "--help", "-h", "*", "~", ".", "/dev", "/dev/null"),
    *("/proc/self/mem", "/no/such/folder", "no-such-file.yaml", "no\nsuch", "no such", "é\u202e", "\udcff", "x" * 300),
    *("1:2", "2:1", ":", "8KB", "-8KB", "1,2,3", "cpu", "cuda", "bf16", "none", "auto", "$(reboot)", "%j", "{rank}"),
)
"""Neither `/` nor `..`: below them lie texts, and a corpus of a whole machine takes its time."""

NOT_ASKED = ("--install-completion", "--show-completion")
"""They are Typer's own, and change the shell."""

NOT_CALLED = ("init", "doctor", "backtest")
"""The first does what it is told with any name, the others take no words and then do their work."""


def commands(group: Any, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Every command, by the words that call it, with the options it takes."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*prefix, name))
        elif name not in NOT_CALLED:
            options = [option for param in command.params for option in param.opts if option.startswith("-")]
            yield (*prefix, name), [option for option in options if option not in NOT_ASKED]


def command_line(rng: random.Random, known: list) -> list[str]:
    """Words for one of the commands, few or many."""
    words, options = rng.choice(known)
    line = list(words)
    for _ in range(rng.choice((0, 1, 1, 2, 3, 5))):
        if options and rng.random() < 0.5:
            line.append(rng.choice(options))
        if rng.random() < 0.8:
            line.append(rng.choice(WORDS))
    if rng.random() < 0.1:
        del line[rng.randrange(len(line))]
    return line


def test_command_lines(num_cases: int, rng: random.Random, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Options, their values and arguments in any order and number."""
    whole = typer.main.get_command(main.app)
    monkeypatch.setattr(main, "app", whole)  # Typer puts it together at every call, which takes longer than all else
    known = list(commands(whole))
    assert len(known) > 30, known

    def run(line: list[str]) -> None:
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                main.main(line)
        except SystemExit as end:
            code = end.code
        assert code in (EXIT_DONE, EXIT_FAULT, EXIT_BAD_INPUT), code
        assert said.getvalue().strip(), "not a word"
        assert "Traceback" not in said.getvalue(), said.getvalue()

    survive((command_line(rng, known) for _ in range(num_cases)), run, tmp_path)
