"""Which statements of the project are for CUDA alone, and which of their lines have run.

A statement counts when it names CUDA, or stands under an `if` that asks for it. A line is looked for where it stands
when it runs, so the list in a test names a statement by its file and its text, and moves with it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from coverage import Coverage

from tests.kit.paths import ROOT

CUDA = re.compile(r"cuda(?!_graphs)|\b_?gpu\b|pin_memory|CUBLAS|nccl", re.IGNORECASE)

SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return, ast.Raise, ast.Delete, ast.Assert)

SHOWN_CHARACTERS = 60

Place = tuple[str, str]
"""A file below the project's root, and how a statement's first line begins."""


class Lines:
    """Lines that run from now on in some files, in every thread that Python starts."""

    def __init__(self, files: Iterable[str]):
        # It looks at each call in C: one in Python, for every call of the compiler's, takes as long as the run
        self._coverage = Coverage(data_file=None, config_file=False, include=[str(ROOT / file) for file in files])
        self._coverage.start()

    def run(self) -> dict[str, list[int]]:
        """The lines of each file that have run so far."""
        found = self._coverage.get_data()
        return {file: sorted(found.lines(file) or ()) for file in found.measured_files()}


def cuda_statements(root: Path = ROOT) -> dict[Place, tuple[int, int]]:
    """Statements for CUDA inside of functions, with their first and last lines."""
    found: dict[Place, tuple[int, int]] = {}
    for path in sorted((root / "megalite").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if not CUDA.search(source):
            continue
        lines = source.splitlines()
        for first, last in _statements(ast.parse(source)):
            found[str(path.relative_to(root)), lines[first - 1].strip()[:SHOWN_CHARACTERS]] = (first, last)
    return found


def _statements(tree: ast.AST) -> Iterator[tuple[int, int]]:
    functions = (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    for function in functions:
        yield from _of_body(function.body, is_asked_for=False)


def _of_body(body: list[ast.stmt], *, is_asked_for: bool) -> Iterator[tuple[int, int]]:
    for statement in body:
        if isinstance(statement, SIMPLE):
            if not _is_text(statement) and (is_asked_for or _names_cuda(statement)):
                yield statement.lineno, statement.end_lineno or statement.lineno
            continue
        if isinstance(statement, ast.If):
            is_asked = _names_cuda(statement.test)
            yield from _of_body(statement.body, is_asked_for=is_asked_for or is_asked)
            yield from _of_body(statement.orelse, is_asked_for=is_asked_for)
            continue
        if isinstance(statement, ast.With) and any(_names_cuda(item) for item in statement.items):
            yield statement.lineno, statement.lineno
        if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            for name in ("body", "orelse", "finalbody"):
                yield from _of_body(getattr(statement, name, []), is_asked_for=is_asked_for)
            for handler in getattr(statement, "handlers", []):
                yield from _of_body(handler.body, is_asked_for=is_asked_for)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _names_cuda(node: ast.AST) -> bool:
    """Whether the code, not a message in it, names CUDA."""
    parts = (part for part in ast.walk(node) if isinstance(part, (ast.Name, ast.Attribute, ast.arg, ast.keyword)))
    names = (getattr(part, "id", None) or getattr(part, "attr", None) or part.arg for part in parts)
    words = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str))
    return any(CUDA.search(name or "") for name in names) or any(word in ("cuda", "nccl") for word in words)
