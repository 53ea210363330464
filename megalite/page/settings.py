"""Settings by their dotted names, for tables."""

from __future__ import annotations

from typing import Any


def flatten(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names, in their order."""
    flat: dict[str, Any] = {}
    for name, each in settings.items():
        flat |= flatten(each, f"{prefix}{name}.") if isinstance(each, dict) and each else {f"{prefix}{name}": each}
    return flat
