"""Plug-ins in this process, for a while, and files of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from megalite import plugins
from megalite.config.load import load_config
from megalite.config.validate import validate
from megalite.errors import ConfigError
from megalite.plugins import Table, load_plugins
from tests.kit.paths import ROOT

SAMPLES = ROOT / "tests" / "plugins"

HEAD = "from megalite import extend\n"

SINE = """
@extend.schedule("sine")
def sine(k, n, peak, min_lr, *, waves: int, depth: float = 0.5):
    return peak
"""
"""A small plug-in with options."""


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


def write_plugin(folder: Path, code: str, name: str = "mine.py") -> str:
    """A file with a plug-in's code, below the import that all have."""
    path = folder / name
    path.write_text(HEAD + dedent(code), encoding="utf-8")
    return str(path)


def write_config(folder: Path, text: str) -> Path:
    """A file with a config's text."""
    path = folder / "run.yaml"
    path.write_text(dedent(text), encoding="utf-8")
    return path


def complaints(folder: Path, text: str) -> list[str]:
    """What loading and validating a config says."""
    with pytest.raises(ConfigError) as error:
        validate(load_config(write_config(folder, text)), 1)
    return list(error.value.problems)
