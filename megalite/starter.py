"""Starter files for a folder of one's own, laid out by `megalite init`: configs, recipes, scripts for Slurm, the docs.

There is one copy of them, at the top of the repository. setup.py puts it into the wheel, beside this module; in a clone
it is read where it is.
"""

from __future__ import annotations

import os
from pathlib import Path

from megalite.errors import UnavailableError, UserError

PACKAGED = Path(__file__).with_name("starter_files")
"""In a wheel."""

CLONE = Path(__file__).parents[1]

NAMES = ("configs", "launch", "docs", "CHANGELOG.md", "LICENSE")
"""What is taken from a clone; setup.py names the same."""

ELSEWHERE = {"CHANGELOG.md": "docs/CHANGELOG.md", "LICENSE": "docs/LICENSE"}
"""Where files of the repository's top go, so that a folder's own top stays its own."""


def starter_files() -> dict[str, Path]:
    """Every starter file by its place in the folder to be made.

    Raises:
        UnavailableError: this installation has none.
    """
    root = _root()
    found = [file for name in NAMES for file in (root / name, *sorted((root / name).rglob("*"))) if file.is_file()]
    names = {file.relative_to(root).as_posix(): file for file in found if "__pycache__" not in file.parts}
    if not names:
        raise UnavailableError(
            f"{PACKAGED}: not there, so this installation of megalite has no starter files; install it from its wheel "
            "or from a clone, `pip install .`"
        )
    return {ELSEWHERE.get(name, name): file for name, file in names.items()}


def starter_folder(name: str) -> Path:
    """Where a folder of starter files lies, which may have none in an installation without them."""
    return _root() / name


def _root() -> Path:
    is_clone = not PACKAGED.is_dir() and (CLONE / "setup.py").is_file()
    return CLONE if is_clone else PACKAGED


def lay_out(folder: Path) -> list[str]:
    """Write the starter files into a folder, which may have others.

    What is there already, byte for byte, stays; so a call that was interrupted can be made again.

    Returns:
        The names of all starter files.

    Raises:
        UserError: a file of the same name says something else, and nothing was changed; or it cannot be written.
    """
    files = {name: source.read_bytes() for name, source in starter_files().items()}
    blocking = next((each for each in (folder, *folder.parents) if os.path.lexists(each)), None)
    if blocking is not None and not blocking.is_dir():
        raise UserError(f"{folder}: {blocking} is no folder; name another one")
    try:
        missing, clashes = _compare(folder, files)
        if clashes:
            more = f" and {len(clashes) - 5} more" if len(clashes) > 5 else ""
            raise UserError(
                f"{folder}: has files of its own where starter files go: {', '.join(clashes[:5])}{more}; nothing was "
                "written; give a new folder, or move them away"
            )
        for name in missing:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f".{path.name}.{os.getpid()}")
            try:
                partial.write_bytes(files[name])
                os.replace(partial, path)
            finally:
                partial.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error}); name a folder that can") from error
    return list(files)


def _compare(folder: Path, files: dict[str, bytes]) -> tuple[list[str], list[str]]:
    """Which files are not there yet, and which names are taken by something else."""
    missing, clashes = [], []
    for name, contents in files.items():
        path = folder / name
        above = [each for each in path.parents if os.path.lexists(each) and not each.is_dir()]
        if above:
            clashes.append(os.path.relpath(above[0], folder))
        elif not os.path.lexists(path):
            missing.append(name)
        elif not path.is_file() or path.read_bytes() != contents:
            clashes.append(name)
    return missing, list(dict.fromkeys(clashes))
