"""requirements.lock stands for what setup.py asks for, with hashes; where it no longer does, that is said."""

from __future__ import annotations

import re
import runpy
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from tests.kit.paths import ROOT

lock = SimpleNamespace(**runpy.run_path(str(ROOT / "tools/packaging/lock.py")))

TEXT = (ROOT / "requirements.lock").read_text(encoding="utf-8")

HASH = "    --hash=sha256:" + "0" * 64


def test_the_lock_satisfies_setup_py():
    """Every requirement of setup.py and of what is locked has a version inside its range; `make lock` mends it."""
    assert lock.complaints(TEXT, lock.declared()) == []


def test_it_names_no_place():
    """Neither an index nor a path: only names, versions and hashes, and torch not at all."""
    assert not re.search(r"://|@|--(extra-)?index|--find-links|^torch", TEXT, re.MULTILINE)
    locked = lock.read(TEXT)
    assert len(locked) > 100
    assert all(hashes for _, hashes in locked.values())
    assert list(locked)[: len(lock.BUILD_TOOLS)] == list(lock.BUILD_TOOLS)
    assert lock.BUILD_END in TEXT


def test_make_installs_what_is_locked():
    """The extras of `make install`, and the line up to which the Makefile installs what packages are built with."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f'-e ".[{",".join(lock.EXTRAS)}]"' in makefile
    assert f"sed '/^{lock.BUILD_END.removesuffix(':')}/q'" in makefile


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text.replace("pydantic==2", "pydantic==1"), "setup.py asks for pydantic>=2"),
        (
            lambda text: re.sub(r"orjson==.*\n(    .*\n)+", "", text),
            "orjson>=3.9: not locked, but setup.py asks for it",
        ),
        (lambda text: text + f"torch==2.13.0 \\\n{HASH}\n", "torch: must not be locked"),
        (lambda text: text + "six==1.0\n", "six==1.0: not understood"),
        (lambda text: text + f"orjson==9.0 \\\n{HASH}\n", "twice"),
        (lambda text: "--index-url https://example.org\n" + text, "--index-url https://example.org: not understood"),
        (lambda text: "", "setuptools: missing"),
    ],
)
def test_what_is_wrong_is_said(change, said):
    """A version out of range, a package that is missing, unhashed, twice or from somewhere else."""
    assert any(said in each for each in lock.complaints(change(TEXT), lock.declared()))


def test_what_locked_packages_ask_for_counts(monkeypatch):
    """Known of those that are installed as they are locked."""
    asked = {"numba": [Requirement("llvmlite>=99")]}
    monkeypatch.setitem(lock.complaints.__globals__, "_required_by", lambda name, version: asked.get(name, []))
    (said,) = lock.complaints(TEXT, [])
    assert said.startswith("llvmlite==")
    assert said.endswith(": numba asks for llvmlite>=99")


def test_a_new_requirement_is_noticed():
    """Of setup.py."""
    wanted = [*lock.declared(), Requirement("brand-new>=1.0")]
    assert lock.complaints(TEXT, wanted) == ["brand-new>=1.0: not locked, but setup.py asks for it"]
