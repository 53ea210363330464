"""Strings on their way into a batch script, one of Slurm's command lines, or a shell: all of them go through here.

    where it goes                         who reads it                       made by
    an argument of sbatch, srun, squeue   getopt: nothing is special         option
    --output of sbatch                    Slurm: %j, and a backslash         option_of_logs
    a line #SBATCH in a script            sbatch's own quotes and escapes    directive
    a line of a script                    bash                               command_line, export_line
    --job-name, and --name=A,B of squeue  Slurm: a comma parts names         job_name

What no quotes can carry through (a line break in a #SBATCH line, a backslash in a path of logs) is refused. A test
walks the code: an option is spelt nowhere else.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from megalite.errors import UserError

_PLAIN = re.compile(r"[\w./:=,@%+-]+", re.ASCII)
"""Words that need no quotes in a #SBATCH line."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
"""Control characters, and what Python makes of bytes that are not UTF-8."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)

_OPTION = re.compile(r"--[a-z][a-z0-9-]*(=.*)?|-[A-Za-z](?!\s).*", re.ASCII | re.DOTALL)
"""`--name`, `--name=value`, `-x`, `-xVALUE`."""

LONGEST_WORD = 4000
"""Bytes; sbatch copies a word of a #SBATCH line into a buffer of 8192."""

LONGEST_NAME = 40
"""Of a run in its jobs' name: squeue cuts longer ones for people anyway."""


def option(name: str, value: object) -> str:
    """An option of one of Slurm's commands, as one argument: `--name=value`.

    Raises:
        UserError: see `check_printable`.
    """
    check_printable(str(value), name)
    return f"--{name}={value}"


def option_of_logs(folder: Path, pattern: str, name: str = "output") -> str:
    """An option that names files for output: in a folder literally, and in there by Slurm's pattern, as in `%j.log`.

    Raises:
        UserError: Slurm cannot be told the folder's name.
    """
    check_log_folder(folder)
    return option(name, f"{str(folder).replace('%', '%%')}/{pattern}")


def directive(word: str) -> str:
    """A line of a batch script that gives sbatch one word of its command line.

    Raises:
        UserError: it is longer than sbatch reads.
    """
    assert not _CONTROL.search(word), f"{word!r} was not checked"
    if len(os.fsencode(word)) > LONGEST_WORD:
        raise UserError(
            f"{word[:40]}...: {len(os.fsencode(word)):,} bytes, and sbatch reads {LONGEST_WORD:,} of a word"
        )
    if not _PLAIN.fullmatch(word):
        escaped = word.replace("\\", "\\\\").replace('"', '\\"')
        word = f'"{escaped}"'
    return f"#SBATCH {word}"


def command_line(words: Iterable[str]) -> str:
    """Words as a shell reads them back, whatever is in them."""
    return shlex.join(words)


def split_command(text: str, what: str) -> list[str]:
    """A command line that a user gives in one string, as words.

    Raises:
        UserError: its quotes do not match.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"{what}: {text!r} is no command line ({error}); quote it as for a shell") from None


def export_line(name: str, value: str) -> str:
    """A shell line that sets a variable.

    Raises:
        UserError: no variable can have that name.
    """
    if not _VARIABLE.fullmatch(name):
        raise UserError(f"{name!r} is no name of a variable; use letters, digits and _, as in NCCL_IB_HCA")
    return f"export {name}={shlex.quote(value)}"


def job_name(prefix: str, folder: Path) -> str:
    """Name of the jobs that belong to a folder: no other folder's have it, and nothing in it is special to Slurm."""
    path = os.fsencode(folder.absolute())
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.name)[:LONGEST_NAME].strip("-")
    return "-".join(filter(None, (prefix, readable, hashlib.sha256(path).hexdigest()[:8])))


def check_printable(text: str, what: str = "") -> None:
    """Refuse what cannot stand in a line.

    Args:
        text: a setting's value.
        what: the setting, where the message would not name it otherwise.

    Raises:
        UserError: it holds a line break, another control character, or bytes that are not UTF-8.
    """
    found = _CONTROL.search(text)
    if found:
        raise UserError(
            f"{_of(what)}found {text!r}, with {found[0]!r} in it, which no line of text can hold; leave it out"
        )


def check_log_folder(folder: Path, what: str = "folder") -> None:
    """Refuse a folder into which Slurm cannot be told to write logs.

    Raises:
        UserError: its name holds a control character or a backslash, which switches Slurm's patterns off.
    """
    check_printable(str(folder), what)
    if "\\" in str(folder):
        raise UserError(f"{what}: found {str(folder)!r}, and Slurm takes no backslash in a path of logs; rename it")


def check_options(options: Sequence[str], owned: Mapping[str, str], what: str = "") -> None:
    """Refuse options of sbatch that cannot be.

    Args:
        options: one a string, as in `--mem=8G`.
        owned: options that are set here, and what to do instead of giving them; short spellings too, as in `-o`.
        what: the setting that holds them, where the message would not name it otherwise.

    Raises:
        UserError: one is no single option, or is owned, or is an owned one cut short, which sbatch would take.
    """
    for each in options:
        check_printable(each, what)
        if not _OPTION.fullmatch(each):
            raise UserError(f"{_of(what)}found {each!r}, expected one option of sbatch a string, as in --mem=8G")
        name = each.split("=")[0] if each.startswith("--") else each[:2]
        full = next((own for own in owned if own == name or (len(name) > 2 and own.startswith(name))), None)
        if full is not None:
            raise UserError(f"{_of(what)}{name} is set by megalite; {owned[full] or 'leave it out'}")


def _of(setting: str) -> str:
    return f"{setting}: " if setting else ""
