"""Commands of pages, as a shell would start them, and what they must be to start."""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import pytest
import torch
from typer.core import TyperCommand
from typer.main import get_command

from megalite.cli.main import app
from tests.kit.paths import ROOT

SHELL_BLOCK = re.compile(r"^```bash\n(.*?)^```", re.DOTALL | re.MULTILINE)

RECORD = r"""
set -eu
exec 3>&1
PATH=/nowhere
command_not_found_handle() { printf '%s\0' "$@" $'\036' >&3; }
source() { command_not_found_handle source "$@"; }
cd() { OLDPWD=$PWD; }
"""
"""Nothing is started: what would be is printed, each word with a NUL behind it, and a record separator at the end."""


def blocks(text: str) -> list[str]:
    """What a page has a shell do."""
    return SHELL_BLOCK.findall(text)


SHOWN_COMMAND = re.compile(r"^(?:\$ )?(megalite .*?[^\\])$|`(megalite [^`]+)`", re.DOTALL | re.MULTILINE)

SAID_BESIDE = re.compile(r"\s{2,}[^\s-].*| [|#;] .*|; .*")
"""What follows a command in its line: what it does, or where its output goes."""


def shown_commands(text: str) -> list[list[str]]:
    """The words behind `megalite` of each command with a config of ours that a page shows whole, in a line of code, a
    prompt before it or not, or within a sentence."""
    found = (match[1] or match[2] for match in SHOWN_COMMAND.finditer(text))
    lines = (re.sub(r"\s*\\\n\s*", " ", command).partition("\n")[0] for command in found)
    whole = (line for line in lines if " configs/" in line and "..." not in line)
    return [shlex.split(SAID_BESIDE.sub("", line))[1:] for line in whole]


def commands(block: str, folder: Path) -> list[list[str]]:
    """The words of each command that a block starts in a folder, loops gone round and variables filled in."""
    bash = shutil.which("bash")
    assert bash is not None
    script = [bash, "--norc", "-c", RECORD + block]
    said = subprocess.run(script, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert (said.returncode, said.stderr) == (0, ""), f"{block}\n{said.stderr}"
    return [record.split("\0")[:-1] for record in said.stdout.split("\036\0")[:-1]]


def parsed(words: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """A verb by its whole name, as `megalite config check`, and what its options and arguments are.

    Raises:
        UsageError: there is no such verb or option.
    """
    seen = list[tuple[str, dict[str, Any]]]()
    with patch.object(TyperCommand, "invoke", lambda _, context: seen.append((context.command_path, context.params))):
        _command().main(list(words), prog_name="megalite", standalone_mode=False)
    (found,) = seen
    return found


@cache
def _command() -> Any:
    """`megalite`, which takes a tenth of a second to be put together."""
    return get_command(app)


@contextmanager
def script_modules(folder: Path) -> Iterator[None]:
    """What scripts of a folder import of each other, by bare names, goes again."""
    before = set(sys.modules)
    try:
        yield
    finally:
        for name in set(sys.modules) - before:
            if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(folder)):
                del sys.modules[name]


class Begun(BaseException):
    """A script has looked at its options and begins to work."""

    def __init__(self, command: Sequence[str] = ()):
        super().__init__()
        self.command = command
        """What it was about to start, where it starts others."""


def script_begins(path: str, arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> Sequence[str]:
    """Run a benchmark until it has looked at its options and would ask a GPU, which is stood in, or start a program.

    Returns:
        That program's command.
    """

    def begin(*given: Any, **_: Any) -> NoReturn:
        raise Begun(given[0] if given else ())

    with monkeypatch.context() as patched, script_modules((ROOT / path).parent):
        patched.syspath_prepend(str((ROOT / path).parent))
        patched.setattr(sys, "argv", [path, *arguments])
        patched.setattr(torch.cuda, "is_available", lambda: True)
        patched.setattr(torch.cuda, "get_device_name", begin)
        patched.setattr(subprocess, "Popen", begin)
        with pytest.raises(Begun) as begun:
            runpy.run_path(str(ROOT / path), run_name="__main__")
    return begun.value.command
