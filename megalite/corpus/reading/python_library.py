"""Text that is on every machine that runs us: the source of Python's own library and of the installed packages."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import xxhash

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
    files = _modules(library, "library")
    packages: list[tuple[Path, str]] = []
    for folder in sorted({Path(paths["purelib"]), Path(paths["platlib"])}):
        packages += _modules(folder, "packages")
    packages.sort(key=lambda file: xxhash.xxh3_64_intdigest(file[1].encode()))
    return library, _up_to(files + packages, max_mb)


def _modules(root: Path, prefix: str) -> list[tuple[Path, str]]:
    found = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not LEFT_OUT.intersection(relative.parts) and path.is_file() and path.stat().st_size <= MAX_FILE_BYTES:
            found.append((path, f"{prefix}/{relative.as_posix()}"))
    return found


def _up_to(files: list[tuple[Path, str]], max_mb: float | None) -> list[tuple[Path, str]]:
    left = float("inf") if max_mb is None else max_mb * 1e6
    chosen = []
    for path, id in files:
        left -= path.stat().st_size
        if left < 0:
            break
        chosen.append((path, id))
    return chosen
