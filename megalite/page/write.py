"""Pages into files."""

from __future__ import annotations

from pathlib import Path

from megalite.errors import UserError
from megalite.files import write_atomically


def write_page(path: Path, text: str) -> None:
    """Write a page in one move, so that nobody sees half of it. Folders that are not there are made.

    Raises:
        UserError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error}); name another file with -o") from error
