"""A tokenizer, packed data and questions, made once."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megalite.corpus.prepare import prepare
from megalite.corpus.recipe import DataRecipe
from tests.kit.data import WORDS, prose, write_json_lines

SEQ_LEN = 64


def write_questions(path: Path, num_questions: int, *, seed: int = 0, empty_contexts: bool = True) -> Path:
    """Questions with two to four choices of different lengths, some contexts empty, some ending in a space."""
    rng = np.random.default_rng(seed)
    lines = []
    for number in range(num_questions):
        context = " ".join(rng.choice(WORDS, rng.integers(2, 12)))
        context = "" if empty_contexts and number % 7 == 0 else context
        context += " " if number % 5 == 0 and context else ""
        choices = [" ".join(rng.choice(WORDS, rng.integers(1, 5))) for _ in range(rng.integers(2, 5))]
        lines.append({"context": context, "choices": choices, "label": int(rng.integers(len(choices)))})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def prepared(tmp_path_factory) -> Path:
    """A folder with `out/tokenizer`, `out/packed/train` and `out/packed/valid`."""
    folder = tmp_path_factory.mktemp("prepared")
    write_json_lines(folder / "a.jsonl", prose(150))
    prepare(
        DataRecipe(
            out=folder / "out",
            sources=[{"path": folder / "a.jsonl"}],
            valid_fraction=0.2,
            tokenizer={"kind": "byte-bpe", "vocab_size": 300},
            pack={"seq_len": SEQ_LEN},
        )
    )
    return folder
