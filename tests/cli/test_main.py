"""How commands end: exit codes and the one line on stderr."""

from __future__ import annotations

import errno

import pytest

from megalite.cli import main, setup
from megalite.errors import EXIT_BAD_INPUT, EXIT_FAULT, EXIT_INTERRUPTED, DataError


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KeyboardInterrupt(), EXIT_INTERRUPTED, "megalite: interrupted; run the same command again to go on"),
        (DataError("raw: nothing here"), EXIT_BAD_INPUT, "megalite: raw: nothing here"),
        (
            OSError(errno.EIO, "Input/output error", "raw/a.jsonl"),
            EXIT_FAULT,
            "megalite: raw/a.jsonl: Input/output error; see to the disk, and run the same command again",
        ),
    ],
)
def test_what_ends_a_command_is_said_in_a_line(monkeypatch, capsys, error, code, line):
    """Ctrl-C and mistakes of the user: no traceback, and a shell can tell them apart."""

    def fail() -> None:
        raise error

    command = next(each for each in main.app.registered_commands if each.callback is setup.doctor)
    monkeypatch.setattr(command, "callback", fail)
    with pytest.raises(SystemExit) as ended:
        main.main(["doctor"])
    assert ended.value.code == code
    assert capsys.readouterr().err.strip() == line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trian"], "No such command 'trian'"),
        (["train"], "Missing argument"),
        (["data", "clean", "raw", "--colour"], "No such option"),
        (["config", "check", "x.yaml", "--world-size", "many"], "Invalid value for '--world-size'"),
    ],
)
def test_a_mistyped_command_is_bad_input(capsys, arguments, said):
    """The usage and what is wrong with it, no traceback."""
    with pytest.raises(SystemExit) as ended:
        main.main(arguments)
    assert ended.value.code == EXIT_BAD_INPUT
    assert said in capsys.readouterr().err
