"""What the data benchmark's cases read is what the stations write: all of it is made and opened."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megalite.data.sources import open_tokens
from tests.kit.paths import ROOT

NUM_DOCUMENTS = 40


@pytest.fixture
def inputs(monkeypatch):
    """The script, which is imported by its bare name, with less to lay end to end."""
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "benchmarks"))
    import data_inputs

    monkeypatch.setattr(data_inputs, "NUM_TOKENS", 60_000)
    yield data_inputs
    sys.modules.pop("data_inputs")


def test_inputs_of_packing_and_loading(inputs, tmp_path: Path):
    """Tokens laid end to end have the counts of a station, and are packed to every length; a second call makes
    nothing."""
    rows = ({"id": str(n), "text": f"document {n} tells of {n * n} things. " * 20} for n in range(NUM_DOCUMENTS))
    (tmp_path / "corpus_dup.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "stats.json").write_text("{}")
    for _ in range(2):
        inputs.prepare(tmp_path, {"load-2048"}, mb=1.0, seed=1, vocab_size=270)
    made, once = inputs.Inputs(tmp_path), open_tokens(tmp_path / "tokens-once")
    tokens = open_tokens(made.tokens, contents=True)
    times = tokens.tokens.num_documents // NUM_DOCUMENTS
    assert times > 1
    assert tokens.tokens.num_tokens == times * once.tokens.num_tokens >= 60_000
    text_bytes = [
        inputs.find_manifest(folder).counts["text_bytes"] for folder in (tmp_path / "tokens-once", made.tokens)
    ]
    assert text_bytes[1] == times * text_bytes[0]
    assert all((made.packed(length) / "manifest.json").is_file() for length in inputs.SEQ_LENS)
