"""Compiled code is renewed when anything that it is made from is edited, wherever that lies, and by nothing else."""

from __future__ import annotations

import fcntl
import importlib
import types
from pathlib import Path

import pytest
from numba.core.dispatcher import Dispatcher

from megalite.kernel_cache import CACHE_FOLDER, LOCK_FILE, PACKAGE, hash_of_sources, is_compiling, sources_of

SOURCES = {
    "kernel.py": "def kernel(function): return function\n",
    "one/own.py": "from lite.kernel import kernel\n"
    "from lite.errors import complain\n"
    "from lite.two.other import STEP, helper\n"
    "from lite.two.shape import Shape\n"
    "from lite.two import sizes\n"
    "LIMIT = _doubled()\n"
    "def _doubled(): return 2 * sizes.LIMIT\n"
    "def plain(): complain()\n"
    "@kernel\n"
    "def run(shape: Shape): return helper(shape.rows, STEP)\n",
    "one/neighbour.py": "X = 1\n",
    "two/other.py": "from lite.kernel import kernel\nfrom lite.three.last import START\n"
    "STEP = 3\n@kernel\ndef helper(rows, step): return rows * step + START\n",
    "two/shape.py": "from typing import NamedTuple\nclass Shape(NamedTuple):\n    rows: int\n",
    "two/sizes.py": "LIMIT = 5\n",
    "three/last.py": "START = 7\n",
    "errors.py": "def complain(): raise ValueError\n",
}

NEEDED = {"kernel.py", "one/own.py", "two/other.py", "two/shape.py", "two/sizes.py", "three/last.py"}


@pytest.fixture
def package(tmp_path) -> Path:
    """A package with a kernel that calls one of another folder, whose constant comes from a third."""
    root = tmp_path / "lite"
    for name, text in SOURCES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize("name", SOURCES)
def test_an_edit_renews_what_is_made_from_it(package, name):
    """A kernel in another folder, its constant, the layout of an argument: all of them; a plain function's: none."""
    before = hash_of_sources(package / "one/own.py", package)
    (package / name).write_text(SOURCES[name] + "# edited\n")
    hash_of_sources.cache_clear()
    assert (hash_of_sources(package / "one/own.py", package) != before) == (name in NEEDED)


def test_every_kernel_that_a_kernel_calls_is_a_source_of_it():
    """In the whole package: what a compiled function finds under a global name comes from a file of its hash."""
    num_calls = 0
    for path in sorted(PACKAGE.rglob("*.py")):
        if not any(f"\n@{name}\n" in path.read_text(encoding="utf-8") for name in ("kernel", "bare_kernel")):
            continue
        module = importlib.import_module(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts))
        sources = sources_of(path)
        for kernel in (each for each in vars(module).values() if isinstance(each, Dispatcher)):
            if kernel.py_func.__module__ != module.__name__:
                continue
            for value in map(module.__dict__.get, kernel.py_func.__code__.co_names):
                assert not isinstance(value, types.ModuleType) or not value.__name__.startswith("megalite"), kernel
                if isinstance(value, Dispatcher):
                    num_calls += 1
                    assert Path(value.py_func.__code__.co_filename) in sources, (kernel, value)
    assert num_calls > 100


def test_whether_somebody_compiles(tmp_path):
    """True while a lock is held, wherever in the package."""
    folder = tmp_path / "room" / "inner" / CACHE_FOLDER
    folder.mkdir(parents=True)
    assert not is_compiling(tmp_path)
    with open(folder / LOCK_FILE, "wb") as file:
        assert not is_compiling(tmp_path)
        fcntl.flock(file, fcntl.LOCK_EX)
        assert is_compiling(tmp_path)
    assert not is_compiling(tmp_path)
