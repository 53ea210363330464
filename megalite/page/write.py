"""Pages into files."""

from __future__ import annotations

import os
from pathlib import Path

from megalite.errors import UserError


def write_page(path: Path, text: str) -> None:
    """Write a page in one move, so that nobody sees half of it. Folders that are not there are made.

    Raises:
        UserError: it cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error}); name another file with -o") from error
