"""Files that are whole or not there."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Replace a file in one move, so that a reader never sees half of it; where that fails, nothing is left of it.

    Raises:
        OSError: it cannot be written, or is no plain file: a device would be replaced too, for everybody.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "is no plain file", str(path))
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
