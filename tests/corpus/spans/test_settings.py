"""Settings of the span stations, and what importing these costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from megalite.corpus.spans.settings import DecontaminateConfig, LineDedupConfig, SubstringConfig, UrlDedupConfig


def test_defaults_are_valid():
    """Every section builds from nothing, but for the files that only the user knows."""
    for section in (SubstringConfig, LineDedupConfig, UrlDedupConfig):
        assert section() == section.model_validate(section().model_dump(mode="json"))
    assert DecontaminateConfig(paths=(Path("a"),)).ngram == 13
    with pytest.raises(ValidationError, match="paths"):
        DecontaminateConfig(paths=())


def test_every_field_is_explained():
    """Each field has a docstring."""
    for section in (SubstringConfig, LineDedupConfig, UrlDedupConfig, DecontaminateConfig):
        assert all(field.description for field in section.model_fields.values()), section


def test_kernels_are_imported_when_needed():
    """Planning a station does not wait for numba."""
    names = ", ".join(
        f"megalite.corpus.spans.{name}" for name in ("contamination", "lines", "removal", "substring", "urls")
    )
    code = f"import sys, {names}; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
