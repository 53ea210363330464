"""Configs that are valid but for what a test sets, and what validation says of them."""

from __future__ import annotations

from typing import Any

from megalite.config.schema import Config
from megalite.config.validate import validate
from megalite.errors import ConfigError


def config(**sections: dict[str, Any]) -> Config:
    """A config that is valid but for the given sections."""
    return Config(**{"train": {"steps": 100}, **sections})


def complaints(checked: Config, world_size: int) -> tuple[str, ...]:
    """What validation has to say of a config; nothing of a valid one."""
    try:
        validate(checked, world_size)
    except ConfigError as error:
        return error.problems
    return ()
