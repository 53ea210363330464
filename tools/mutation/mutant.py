"""A small fault that somebody could make."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """One change of one place."""

    file: str
    """Below megalite/."""
    old: str
    """Stands in the file once."""
    new: str
    tests: str
    """What is run, as pytest takes it, below tests/."""
