"""What is known of compiled kernels without numba: from which sources they are made, whether they are there, who waits.

numba keeps compiled code until the file of the function itself changes. Kernels call each other across files, and hold
the constants that they use, so an edit of one would leave its old code inside the others, without a word: after a
`git pull`, say. So the name under which a kernel is cached holds a hash of all files that its code can come from:

    its own file --names that kernels, constants and named tuples use--> the files that these come from, and so on

What only plain functions of these files use stays out, or every edit of an error message would compile everything anew.
"""

from __future__ import annotations

import ast
import fcntl
import hashlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

PACKAGE = Path(__file__).parent

DECORATORS = frozenset({"kernel", "bare_kernel"})
"""Of functions that are compiled; see `kernel.py`, which is a source of all of them."""

CACHE_FOLDER = "__pycache__"

LOCK_FILE = "kernels.lock"
"""Beside the compiled code, held by the process that compiles."""


@lru_cache
def hash_of_sources(path: Path, package: Path = PACKAGE) -> str:
    """A hash of all files that the kernels of a file are made from, 16 hexadecimal digits."""
    content = hashlib.sha256()
    for source in sources_of(path, package):
        name = source.relative_to(package) if source.is_relative_to(package) else source.name  # a kernel of a user's
        content.update(f"{name}:".encode() + source.read_bytes())
    return content.hexdigest()[:16]


def sources_of(path: Path, package: Path = PACKAGE) -> list[Path]:
    """The file of some kernels, and all others that their code or constants can come from, sorted."""
    found, waiting = {package / "kernel.py"}, [path]
    while waiting:
        source = waiting.pop()
        if source not in found:
            found.add(source)
            waiting += _needed(source, package)
    return sorted(each for each in found if each.is_file())


@lru_cache
def _needed(path: Path, package: Path) -> frozenset[Path]:
    """Files of the package that the kernels and constants of a file take something from."""
    tree = ast.parse(path.read_bytes())
    imported = dict(_imports(tree, package))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    waiting: list[ast.AST] = [node for node in tree.body if _is_compiled_in(node)]
    names: set[str] = set()
    while waiting:
        used = {each.id for each in ast.walk(waiting.pop()) if isinstance(each, ast.Name)} - names
        names |= used
        waiting += [functions[name] for name in used & functions.keys()]
    return frozenset(imported[name] for name in (names - DECORATORS) & imported.keys())


def _is_compiled_in(node: ast.stmt) -> bool:
    """Whether compiled code may hold this: a kernel, a constant, or the layout of what kernels are given."""
    if isinstance(node, ast.FunctionDef):
        return any(isinstance(each, ast.Name) and each.id in DECORATORS for each in node.decorator_list)
    if isinstance(node, ast.ClassDef):
        return any(isinstance(each, ast.Name) and each.id == "NamedTuple" for each in node.bases)
    return isinstance(node, (ast.Assign, ast.AnnAssign))


def _imports(tree: ast.AST, package: Path) -> Iterator[tuple[str, Path]]:
    """Names that are imported from the package, and the files that they come from."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == package.name:
            module = package.joinpath(*node.module.split(".")[1:])
            for alias in node.names:
                inner = module / f"{alias.name}.py"
                own = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
                yield alias.asname or alias.name, inner if inner.is_file() else own


def is_compiled(path: Path, name: str) -> bool:
    """Whether a kernel of a file has been compiled, for some types, since one of its sources was changed."""
    pattern = f"{path.stem}.{name}_{hash_of_sources(path)}-*.nbi"
    return any((path.parent / CACHE_FOLDER).glob(pattern))


def is_compiling(package: Path = PACKAGE) -> bool:
    """Whether a process of this machine is compiling kernels just now."""
    for depth in ("*", "*/*"):
        for path in package.glob(f"{depth}/{CACHE_FOLDER}/{LOCK_FILE}"):
            try:
                with open(path, "rb") as file:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            except OSError:  # it is gone, or the disk has no locks
                continue
    return False
