"""The config of the run that wrote a checkpoint, as its file in the checkpoint has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from megalite.checkpoint.format import CONFIG
from megalite.errors import CheckpointError


def run_config(folder: Path) -> dict[str, Any]:
    """The settings of a checkpoint's run; none where it was not written by one.

    Raises:
        CheckpointError: the file is damaged.
    """
    path = folder / CONFIG
    if not path.is_file():
        return {}
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        why = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise CheckpointError(f"{path}: damaged ({why}); put the run's config back, or take an older one") from error
    return found if isinstance(found, dict) else {}


def section(config: dict[str, Any], name: str) -> dict[str, Any]:
    """One of its sections; empty where it is not there."""
    found = config.get(name)
    return found if isinstance(found, dict) else {}
