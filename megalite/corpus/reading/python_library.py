"""Text that is on every machine that runs us: the source of Python's own library and of the installed packages."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import xxhash

from megalite.corpus.reading.files import walk

LEFT_OUT = {"test", "tests", "idlelib", "turtledemo", "site-packages", "dist-packages", "__pycache__"}
"""Folders that repeat themselves, or that are listed by themselves."""

MAX_FILE_BYTES = 300_000
"""Larger modules are tables that programs wrote."""


def list_python_files(max_mb: float | None) -> tuple[Path, list[tuple[Path, str]]]:
    """The library's modules, then the packages' in a fixed mixed order, so that a cut leaves a bit of each.

    Args:
        max_mb: stop after this many million bytes; None for all.

    Returns:
        The folder of the standard library, and (path, id) of the files.
    """
    paths = sysconfig.get_paths()
    library = Path(paths["stdlib"])
    folders = sorted({Path(paths["purelib"]), Path(paths["platlib"])})
    return library, _up_to(_all_modules(library, folders), max_mb)


def _all_modules(library: Path, folders: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    """Packages are looked through, which takes seconds, only where the library is not enough."""
    yield from _modules(library, "library")
    packages = [module for folder in folders for module in _modules(folder, "packages")]
    yield from sorted(packages, key=lambda file: xxhash.xxh3_64_intdigest(file[1].encode()))


def _modules(root: Path, prefix: str) -> list[tuple[Path, str]]:
    paths: list[Path] = []
    for folder, subfolders, names in walk(root):
        subfolders[:] = [name for name in subfolders if name not in LEFT_OUT]
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    wanted = (path for path in sorted(paths) if path.is_file() and path.stat().st_size <= MAX_FILE_BYTES)
    return [(path, f"{prefix}/{path.relative_to(root).as_posix()}") for path in wanted]


def _up_to(files: Iterable[tuple[Path, str]], max_mb: float | None) -> list[tuple[Path, str]]:
    left = float("inf") if max_mb is None else max_mb * 1e6
    chosen = []
    for path, id in files:
        left -= path.stat().st_size
        if left < 0:
            break
        chosen.append((path, id))
    return chosen
