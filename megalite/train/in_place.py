"""Small JSON files that are overwritten where they stand, for what is said again and again and read by other nodes.

They keep their length, so writing needs no room: a full disk silences nobody. Reading opens them anew, so that a
network file system shows what was written last; a file that is caught half-written is read again.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

NUM_READS = 3


def write_in_place(path: Path, content: dict[str, Any], num_bytes: int) -> None:
    """Write what is said, and blanks up to the file's length."""
    line = json.dumps(content).ljust(num_bytes - 1) + "\n"
    assert len(line) == num_bytes, f"{path}: {len(line)} bytes do not go into {num_bytes}"
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


def read_in_place(path: Path) -> tuple[dict[str, Any] | None, float]:
    """What a file says, and when it was written by the file server's clock; None for one that says nothing yet."""
    for _ in range(NUM_READS):
        try:
            return json.loads(path.read_text(encoding="utf-8")), path.stat().st_mtime
        except (OSError, ValueError):  # being written at this moment, on a file system that shows it
            continue
    return None, 0.0


def clock_of(folder: Path) -> float:
    """The time by the clock of the file system that holds a folder.

    The folder itself is touched, without a time of our own: the file server puts in its own, and nothing is left over.
    """
    os.utime(folder)
    return folder.stat().st_mtime
