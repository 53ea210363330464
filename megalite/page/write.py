"""Pages into files."""

from __future__ import annotations

import os
import tempfile
from errno import EISDIR
from pathlib import Path

from megalite.errors import UserError
from megalite.files import write_atomically


def write_page(path: Path, text: str, option: str = "-o") -> None:
    """Write a page in one move, so that nobody sees half of it. Folders that are not there are made.

    Args:
        option: that has named the file, for what is said.

    Raises:
        UserError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    except OSError as error:
        raise _unwritable(path, error, option) from error


def check_writable(path: Path, option: str = "-o") -> None:
    """Find out whether `write_page` would write a file, before what goes into it is made.

    Raises:
        UserError: it would not.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(EISDIR, os.strerror(EISDIR))
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise _unwritable(path, error, option) from error


def _unwritable(path: Path, error: OSError, option: str) -> UserError:
    return UserError(f"{path}: cannot be written ({error.strerror or error}); name another file with {option}")
