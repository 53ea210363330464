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
    """Load plug-ins as the first ones of this process, and forget them again with all that was loaded meanwhile."""
    before = [(table, name, table[name], table._origins[name]) for table, name in plugins._ADDITIONS]
    known = dict(plugins._LOADED)
    _forget()
    try:
        load_plugins(names)
        yield
    finally:
        _forget()
        plugins._LOADED.update(known)
        for table, name, entry, origin in before:
            table.add(name, entry)
            table._origins[name] = origin


def _forget() -> None:
    for table, name in list(plugins._ADDITIONS):
        table.remove(name)
    plugins._LOADED.clear()


@contextmanager
def added(table: Table[Any], name: str, entry: Any) -> Iterator[None]:
    """An entry more."""
    table.add(name, entry)
    try:
        yield
    finally:
        table.remove(name)
