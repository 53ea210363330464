"""What the verbs ask of a path on which they are to write, before they begin."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from megalite.errors import UserError


def named(path: Path | None) -> Path | None:
    """Refuse `.`, `..`, `/` and links that lead nowhere: what is made grows under another name beside its own, and is
    renamed when whole."""
    _refuse_no_name(path)
    if path is not None and os.path.islink(path) and not os.path.exists(path):
        raise UserError(f"{path}: is a link to {os.readlink(path)}, where nothing is; remove it, or give another name")
    return path


def named_file(path: Path | None) -> Path | None:
    """Refuse also what no file can be written to: a folder, a device, a name below a file, a place of others."""
    _refuse_no_name(path)
    if path is None:
        return None
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "no plain file"
        raise UserError(f"{path}: is {what}; give the name of a file to write")
    found = next(parent for parent in path.absolute().parents if parent.exists())
    if not found.is_dir():
        raise UserError(f"{path}: {found} is no folder; give another name")
    if not os.access(found, os.W_OK | os.X_OK):
        raise UserError(f"{path}: {found} may not be written to; give another name")
    return path


def _refuse_no_name(path: Path | None) -> None:
    if path is not None and path.name in ("", ".."):
        raise UserError(f"{path}: no name for something new; give one, as {path / 'NAME'}")


def not_an_input(path: Path | None, *inputs: Path) -> None:
    """Refuse to write over a file that is read, or one in a folder that is."""
    for each in inputs:
        if path is None or not path.exists() or not each.exists():
            continue
        if path.samefile(each) or any(parent.samefile(each) for parent in path.resolve().parents):
            raise UserError(f"{path}: is read here, and would be written over; give another name")


def not_an_input_but(suffix: str, path: Path | None, *inputs: Path | None) -> None:
    """The same for what is drawn anew beside its inputs, as a run's report is: names with its suffix are its own."""
    if path is not None and path.suffix != suffix:
        not_an_input(path, *(each for each in inputs if each is not None))


def named_drawing(path: Path | None) -> Path | None:
    """Refuse also a name that no figure is written under."""
    from megalite.monitor.curves import require_format

    named_file(path)
    if path is not None:
        require_format(path)
    return path


Drawing = Annotated[
    Path | None,
    typer.Option(
        "--out", "-o", callback=named_drawing, help="Draw it into this file, .svg or .png.", show_default=False
    ),
]
"""Option of a verb that can draw what it has found."""
