"""One small prepared set for all tests of cards, with a hostile name and hostile ids in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megalite.corpus.prepare import prepare
from megalite.corpus.recipe import DataRecipe
from tests.kit.data import prose

HOSTILE = '<script>alert("1")</script>&'


def write_documents(path: Path, texts: list[str], prefix: str) -> None:
    """Documents with ids that no page should take for markup."""
    path.parent.mkdir(parents=True, exist_ok=True)
    records = ({"id": f"{prefix}{HOSTILE}{number}", "text": text} for number, text in enumerate(texts))
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def small_recipe(folder: Path) -> DataRecipe:
    """Two sources with rejects, equal texts, near-equal texts and an address to redact in them."""
    stories = prose(120)
    longer = [" ".join(f"word{word}of{number}" for word in range(200)) for number in range(5)]
    near = [f"{text} and more" for text in longer]
    write_documents(folder / "a.jsonl", [*stories, "short", "tiny", "write to anna@firma.de " * 3], "a")
    write_documents(folder / "b.jsonl", [*stories[:20], *prose(60, seed=1), *longer, *near, "été " * 40], "b")
    return DataRecipe(
        out=folder / "out",
        sources=[{"path": folder / "a.jsonl", "name": HOSTILE}, {"path": folder / "b.jsonl"}],
        valid_fraction=0.1,
        clean={"privacy": {}, "min_chars": 20},
        near_dedup={},
        tokenizer={"kind": "byte-bpe", "vocab_size": 300},
        pack={"seq_len": 64},
    )


@pytest.fixture(scope="session")
def recipe(tmp_path_factory) -> DataRecipe:
    """The recipe, run."""
    made = small_recipe(tmp_path_factory.mktemp("card"))
    prepare(made)
    return made
