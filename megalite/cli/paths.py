"""What the verbs ask of a path on which they are to write."""

from __future__ import annotations

from pathlib import Path

from megalite.errors import UserError


def named(path: Path | None) -> Path | None:
    """Refuse `.`, `..` and `/`: what is made grows under another name beside its own, and is renamed when whole."""
    if path is not None and path.name in ("", ".."):
        raise UserError(f"{path}: no name for something new; give one, as {path / 'NAME'}")
    return path
