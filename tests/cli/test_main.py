"""How commands end: exit codes and the one line on stderr."""

from __future__ import annotations

import errno
import os
import subprocess

import pytest
import typer
from rich.text import Text

from megalite.cli import main, setup
from megalite.cli.main import app
from megalite.errors import EXIT_BAD_INPUT, EXIT_FAULT, EXIT_INTERRUPTED, DataError
from tests.kit.paths import ROOT
from tests.kit.runs import COMMAND, clean_environment, write_run


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
        (
            PermissionError(errno.EACCES, "Permission denied", "work/clean"),
            EXIT_BAD_INPUT,
            "megalite: work/clean: Permission denied; open it to the user who runs this",
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


def test_a_file_that_ends_too_soon_is_no_interruption(monkeypatch):
    """Both reach us as one exception."""

    def fail() -> None:
        raise EOFError("no data left in file")

    command = next(each for each in main.app.registered_commands if each.callback is setup.doctor)
    monkeypatch.setattr(command, "callback", fail)
    with pytest.raises(EOFError, match="no data left"):
        main.main(["doctor"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trian"], "No such command 'trian'"),
        (["train"], "Missing argument"),
        (["data", "clean", "raw", "--colour"], "No such option"),
        (["data", "clean", "", "--out", "x"], "found an empty path among the inputs"),
        (["config", "check", "x.yaml", "--world-size", "many"], "Invalid value for '--world-size'"),
    ],
)
def test_a_mistyped_command_is_bad_input(capsys, arguments, said):
    """The usage and what is wrong with it, no traceback."""
    with pytest.raises(SystemExit) as ended:
        main.main(arguments)
    assert ended.value.code == EXIT_BAD_INPUT
    assert said in capsys.readouterr().err


TORCH = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(20)
except KeyboardInterrupt:
    os.abort()  # as its C++ does, through which no exception may go
"""


def test_ctrl_c_while_torch_is_imported(tmp_path):
    """One line and the code of an interruption, from the place where an exception would abort the process."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(TORCH)
    config = write_run(tmp_path, parallel={"tp": 1})
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [*COMMAND, "doctor", str(config)],
        capture_output=True,
        text=True,
        env={**clean_environment(), "PYTHONPATH": path},
        timeout=60,
        check=False,
    )
    assert done.returncode == EXIT_INTERRUPTED, done.stderr
    assert done.stderr.splitlines() == ["megalite: interrupted; run the same command again to go on"]


@pytest.mark.parametrize(
    "command",
    [
        ("lr-find", "-o"),
        ("mup", "check", "-o"),
        ("schedule", "plot", "-o"),
        ("plan", "scaling", "--plot"),
        ("profile", "--memory"),
    ],
    ids=" ".join,
)
def test_a_name_that_no_figure_is_written_under(command, tmp_path, capsys):
    """Is refused before the work, not behind it."""
    *verb, option = command
    with pytest.raises(SystemExit) as ended:
        main.main([*verb, str(write_run(tmp_path)), option, str(tmp_path / "figure.jpg")])
    assert ended.value.code == EXIT_BAD_INPUT
    assert "figure.jpg: a figure is written as .svg, .png, .pdf" in capsys.readouterr().err


def test_help_shows_all_that_was_written():
    """Square brackets are markup to what prints help, and would be left out."""
    commands, texts = [("megalite", typer.main.get_command(app))], {}
    while commands:
        name, command = commands.pop()
        commands += [(f"{name} {each}", sub) for each, sub in getattr(command, "commands", {}).items()]
        texts[name] = command.help or ""
        texts |= {f"{name} {option.name}": getattr(option, "help", None) or "" for option in command.params}
    assert len(texts) > 300
    assert {name: text for name, text in texts.items() if Text.from_markup(text).plain != text} == {}
