"""What a registry names as `module:name`, loaded when it is first needed."""

from __future__ import annotations

import importlib
from typing import Any


def load(place: str) -> Any:
    """The object of a module."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)
