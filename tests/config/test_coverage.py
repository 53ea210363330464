"""docs/coverage.md: its lines are settings that there are, of the values that they say."""

from __future__ import annotations

import re

import pytest

from megalite.config.load import load_config
from tests.kit.paths import ROOT

OVERRIDES = re.compile(r"`([a-z_]+\.[a-z_.]+=[^`]*)`")
PLACEHOLDER = re.compile(r"\.\.\.|[A-Z]{3,}")
"""Values that a reader fills in."""


def rows() -> list[str]:
    page = (ROOT / "docs/coverage.md").read_text(encoding="utf-8")
    return [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| demand")]


def lines() -> list[str]:
    found = (line for row in rows() for line in OVERRIDES.findall(row))
    return [line for line in found if not PLACEHOLDER.search(line)]


@pytest.mark.parametrize("line", lines())
def test_settings_are_there(line: str):
    """On top of the demo's config; what some need besides is said on their pages."""
    load_config(ROOT / "configs/demo.yaml", re.split(r" (?=[a-z_]+\.[a-z_.]+=)", line))


def test_every_row_names_code_and_a_test():
    """Or says where it stands."""
    for row in rows():
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 2 or cells[1] == "see the end" or ("test_" in cells[3] and ".py" in cells[2]), row
