"""Questions and answers out of Python's own documentation: what a function or a class does, as its docstring says.

Every machine has them, so a demonstration of fine-tuning needs no network; and they are true of something, which can be
looked up.
"""

from __future__ import annotations

import ast
import inspect
import re
import warnings
from collections.abc import Iterator
from typing import Any

import xxhash

SHORTEST, LONGEST = 20, 400
"""Characters of an answer."""

MOST_OF_SIGNATURE = 80

OF_FUNCTIONS = (
    "What does the function `{}` do?",
    "What is `{}` for?",
    "Explain `{}`.",
)
OF_CLASSES = (
    "What is the class `{}`?",
    "What is `{}` for?",
    "Explain the class `{}`.",
)

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def questions_in(source: bytes, id: str, *, are_pairs: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """A question and its answer for each public function and class of a module that has a docstring.

    Args:
        source: the module's text; of one that is no Python there are none.
        id: of its file, as `list_python_files` has it.
        are_pairs: beside each answer stands a rejected one, its own words in another order.

    Yields:
        The name in the module, and a record with `messages`, or with `prompt`, `chosen` and `rejected`.
    """
    module = re.sub(r"(/__init__)?\.py$", "", id.partition("/")[2]).replace("/", ".")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what other people's modules write
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for name, node in _definitions(tree, ""):
        answer = _answer(node)
        if SHORTEST <= len(answer) <= LONGEST:
            phrases = OF_CLASSES if isinstance(node, ast.ClassDef) else OF_FUNCTIONS
            called = f"{module}.{name}{_arguments(node)}"
            phrase = phrases[xxhash.xxh3_64_intdigest(called.encode()) % len(phrases)]
            question = phrase.format(called)
            if not are_pairs:
                yield name, {"messages": _turns(question, answer)}
            elif (worse := _shuffled(answer)) != answer:
                yield name, {"prompt": question, "chosen": answer, "rejected": worse}


def _shuffled(answer: str) -> str:
    """The same words in an order that follows from them."""
    words = enumerate(answer.split())
    return " ".join(
        word for _, word in sorted(words, key=lambda each: xxhash.xxh3_64_intdigest(f"{each[0]} {answer}".encode()))
    )


def _turns(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _definitions(tree: ast.AST, prefix: str) -> Iterator[tuple[str, Definition]]:
    """Public ones of a module, and of its classes."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Definition) and not node.name.startswith("_"):
            yield f"{prefix}{node.name}", node
            if isinstance(node, ast.ClassDef):
                yield from _definitions(node, f"{prefix}{node.name}.")


def _answer(node: Definition) -> str:
    """The first paragraph of a docstring, in one line."""
    text = ast.get_docstring(node) or ""
    return " ".join(inspect.cleandoc(text).partition("\n\n")[0].split())


def _arguments(node: Definition) -> str:
    """A function's, as they are called; nothing of a class."""
    if isinstance(node, ast.ClassDef):
        return ""
    given = [each.arg for each in (*node.args.posonlyargs, *node.args.args) if each.arg not in ("self", "cls")]
    text = f"({', '.join(given)})"
    return text if len(text) <= MOST_OF_SIGNATURE else "(...)"
