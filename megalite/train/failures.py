"""Failures of ranks: what one leaves for whoever started it (`logs/error-RANK.json` in the run's folder), and when to
stop trying: failures in a row between which the run got nowhere."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.checkpoint.catalog import CHECKPOINTS, latest, step_of

_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Read error",
    "Timed out waiting",
    "No route to host",
    "ncclRemoteError",
    "ncclSystemError",
)
"""What gloo and NCCL say of a peer that is gone."""


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


def speaks_of_a_peer(error: dict[str, Any]) -> bool:
    """Whether a rank's error only says that another one is gone."""
    return any(words in error["message"] for words in _LOST_PEER)


@dataclass
class Failures:
    """Failures since the last new checkpoint."""

    in_a_row: int = 0
    last_step: int = 0
    """Of the newest checkpoint when the last one happened."""

    def add(self, run_dir: Path) -> int:
        """Count a failure of a run; how many there are now in a row."""
        newest = latest(run_dir / CHECKPOINTS)
        step = step_of(newest) if newest is not None else 0
        self.in_a_row = 1 if step > self.last_step else self.in_a_row + 1
        self.last_step = step
        return self.in_a_row
