"""Documents with something to look up: codes that are stated and repeated in real text.

    python tools/examples/facts.py OUT.jsonl [--documents 1000] [--chars 250:450] [--facts 1:2] [--times 6] [--seed 0]

A sentence such as "The code of Timile is 4439." stands in a document as often as --times says, at drawn places, among
docstrings of Python's own library. The second time on it can be predicted by looking back, and by nothing else: a tiny
model learns to do so from short documents, and how far back it then looks is seen by `megalite eval --needle`, which
asks for such codes.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from megalite.train.evaluation.needle import NEEDLE, SYLLABLES

SHORTEST = 200
"""Characters of a docstring that is taken."""


def docstrings() -> Iterator[str]:
    """Those of the standard library, each in one line."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node) or ""
                if len(text) > SHORTEST:
                    yield " ".join(text.split())


def document(drawn: random.Random, texts: list[str], num_chars: int, num_facts: int, times: int) -> str:
    """About so many characters, facts among them."""
    names = ["".join(drawn.choices(SYLLABLES, k=3)).capitalize() for _ in range(num_facts)]
    facts = [NEEDLE.format(name=name, code=drawn.randrange(1000, 10000)) for name in names]
    room, hay = max(0, num_chars - times * sum(len(fact) + 1 for fact in facts)), ""
    while len(hay) < room:
        hay += drawn.choice(texts) + " "
    words = hay[:room].split()
    said = sorted((drawn.randint(0, len(words)), fact) for fact in facts for _ in range(times))
    parts, done = list[str](), 0
    for place, fact in said:
        parts += [*words[done:place], fact]
        done = place
    return " ".join([*parts, *words[done:]])


def count(text: str) -> int:
    """A whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a whole number from 1 on")
    return int(text)


def new_file(text: str) -> Path:
    """A file in a folder that is there."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"found {text!r}, expected the name of a file in a folder that is there")
    return path


def span(text: str) -> tuple[int, int]:
    """Two whole numbers as A:B, the first no larger."""
    try:
        low, high = (int(part) for part in text.split(":"))
    except ValueError:
        low, high = 1, 0
    if not 1 <= low <= high:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected A:B with whole numbers, such as 250:450")
    return low, high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=new_file)
    parser.add_argument("--documents", type=count, default=1000)
    parser.add_argument("--chars", type=span, default=(250, 450))
    parser.add_argument("--facts", type=span, default=(1, 2))
    parser.add_argument("--times", type=count, default=6)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    drawn, texts = random.Random(given.seed), list(docstrings())
    with given.out.open("w", encoding="utf-8") as file:
        for _ in range(given.documents):
            text = document(drawn, texts, drawn.randint(*given.chars), drawn.randint(*given.facts), given.times)
            file.write(json.dumps({"text": text}) + "\n")


if __name__ == "__main__":
    main()
