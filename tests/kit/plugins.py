"""Plug-ins in this process, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megalite import plugins
from megalite.plugins import Table, load_plugins
from tests.kit.paths import ROOT

SAMPLES = ROOT / "tests" / "plugins"


def sample(name: str) -> str:
    """The file of a sample plug-in."""
    return str(SAMPLES / f"{name}.py")


@contextmanager
def loaded(*names: str) -> Iterator[None]:
    """Load plug-ins, and forget them again with all that was loaded meanwhile."""
    before, known = len(plugins._ADDITIONS), set(plugins._LOADED)
    try:
        load_plugins(names)
        yield
    finally:
        for table, name in plugins._ADDITIONS[before:]:
            table.remove(name)
        for name in set(plugins._LOADED) - known:
            del plugins._LOADED[name]


@contextmanager
def added(table: Table[Any], name: str, entry: Any) -> Iterator[None]:
    """An entry more."""
    table.add(name, entry)
    try:
        yield
    finally:
        table.remove(name)
