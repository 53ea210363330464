"""Pages of docs/ that are made of code: files that they show, and the API page. `python -m tests.kit.docs` writes them.

A page shows a file between a line `<!-- file: PATH -->` and the end of the block of code behind it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import megalite
from megalite import extend
from megalite.train.components import component
from tests.kit.paths import ROOT

SHOWN = re.compile(r"(<!-- file: (\S+) -->\n)```(\w+)\n.*?```\n", re.DOTALL)

API_PAGE = ROOT / "docs" / "api.md"

INTRODUCTION = """# API

Made of the docstrings by `python -m tests.kit.docs`; a test keeps the two equal. docs/library.md and docs/extending.md
tell how these are used. What stands here stays, or is said in CHANGELOG.md; other modules may change.
"""

PARTS = (
    ("`from megalite import ...`", megalite, megalite.__all__),
    (
        "`from megalite import extend`",
        extend,
        (
            *("activation", "norm", "attention", "optimizer", "schedule", "loss", "metric", "component"),
            *("filter_rule", "data_source", "family"),
        ),
    ),
    ("`megalite.train.components.component`", component, ("Component", "Step", "RollBack", "Context")),
)


def with_files(text: str) -> str:
    """A page with the files that it shows as they are now."""
    return SHOWN.sub(lambda found: f"{found[1]}```{found[3]}\n{(ROOT / found[2]).read_text()}```\n", text)


def api_page() -> str:
    """The page of all that is stated."""
    parts = [INTRODUCTION]
    for title, module, names in PARTS:
        parts.append(f"## {title}\n")
        parts += [describe(name, getattr(module, name)) for name in names]
    return "\n".join(parts)


def describe(name: str, thing: Any) -> str:
    """A function, or a class with its public methods."""
    lines = [f"### `{name}`\n", f"```python\n{signature(name, thing)}\n```\n", f"{text_of(thing)}\n"]
    if inspect.isclass(thing) and thing.__module__ == component.__name__:
        methods = [(each, method) for each, method in vars(thing).items() if callable(method) and each[0] != "_"]
        lines += [f"- `{signature(each, method)}`\n\n{indented(text_of(method))}\n" for each, method in methods]
    return "\n".join(lines)


def signature(name: str, thing: Callable[..., Any]) -> str:
    """How it is called."""
    if inspect.isclass(thing) and (issubclass(thing, BaseModel | Exception)):
        return f"class {name}"
    prefix = "class " if inspect.isclass(thing) else "def "
    found = inspect.signature(thing)
    shown = [as_written(each) for each in found.parameters.values()]
    returns = f" -> {found.return_annotation}" if isinstance(found.return_annotation, str) else ""
    return f"{prefix}{name}{found.replace(parameters=shown, return_annotation=found.empty)}{returns}"


class Raw(str):
    """An annotation that is printed as it was written."""

    def __repr__(self) -> str:
        return str(self)


def as_written(parameter: inspect.Parameter) -> inspect.Parameter:
    """Annotations as they stand in the code; a function that is a default by its name."""
    default, annotation = parameter.default, parameter.annotation
    return parameter.replace(
        annotation=Raw(annotation) if isinstance(annotation, str) else annotation,
        default=Raw(default.__name__) if inspect.isfunction(default) else default,
    )


def text_of(thing: Any) -> str:
    """The docstring, its sections in bold."""
    text = re.sub(r"\n {8}", " ", inspect.getdoc(thing) or "")
    return re.sub(
        r"^(Args|Returns|Raises):$", r"**\1**\n", re.sub(r"^    (\w+): ", r"- `\1`: ", text, flags=re.M), flags=re.M
    )


def indented(text: str) -> str:
    return "\n".join(f"  {line}".rstrip() for line in text.splitlines())


def pages() -> dict[Path, str]:
    """What every such page should be."""
    made = {path: with_files(path.read_text()) for path in sorted((ROOT / "docs").glob("*.md")) if path != API_PAGE}
    return {**made, API_PAGE: api_page()}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
