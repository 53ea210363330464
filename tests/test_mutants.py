"""The mutants of tools/mutation are still places of the code."""

from __future__ import annotations

import importlib.util

from tests.kit.paths import ROOT


def test_every_mutant_changes_one_place(monkeypatch):
    """What it replaces stands in its file once, and its tests are there."""
    monkeypatch.syspath_prepend(ROOT / "tools/mutation")
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "tools/mutation/mutants.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for mutant in module.MUTANTS:
        source = (ROOT / "megalite" / mutant.file).read_text(encoding="utf-8")
        assert source.count(mutant.old) == 1, mutant
        for path in mutant.tests.split():
            assert (ROOT / "tests" / path.split("::")[0]).exists(), mutant
