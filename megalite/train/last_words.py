"""What a rank leaves behind when it fails, for whoever started it: `logs/error-RANK.json` in the run's folder."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any


def error_path(run_dir: Path, rank: int) -> Path:
    """Where a rank leaves its error."""
    return run_dir / "logs" / f"error-{rank}.json"


def leave_error(run_dir: Path, rank: int, record: dict[str, Any]) -> OSError | None:
    """Write a rank's error, whole or not at all; why that could not be done."""
    path = error_path(run_dir, rank)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record), encoding="utf-8")
    except OSError as error:  # a full disk must not hide the first error
        with suppress(OSError):
            path.unlink()
        return error
    return None


def read_error(path: Path) -> dict[str, Any] | None:
    """An error that a rank has left; None where there is none, or it was killed while it wrote."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
