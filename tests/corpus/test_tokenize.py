"""Tokenization: the reference ids of every document and one end-of-text token, the same bytes for any workers."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import tokenizers
import transformers

from megalite.config.schema import SourceConfig
from megalite.corpus.split import CorpusSplit, parse_split
from megalite.corpus.stations.forms import Forms
from megalite.corpus.stations.tokenize import tokenize
from megalite.data.indexed import IndexedTokens
from megalite.data.samples import open_samples
from megalite.errors import DataError
from megalite.stations.runners import LocalPool
from megalite.tokenizer.settings import FillInConfig
from megalite.tokenizer.tokenizer import Tokenizer
from tests.corpus.stations.test_filters import Summary
from tests.kit.data import all_bytes, corpus_of, prose, write_json_lines


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return prose(120)


def documents_of(folder) -> list[list[int]]:
    tokens = IndexedTokens(folder / "tokens")
    starts = tokens.document_starts(0, tokens.num_documents + 1).tolist()
    return [tokens.read(start, stop).tolist() for start, stop in pairwise(starts)]


def test_each_document_is_its_ids_and_one_eos(tmp_path, texts, tokenizer_folder):
    """Against encoding one by one, a document that spells control tokens included; counts agree."""
    tokenizer = Tokenizer.load(tokenizer_folder)
    texts = [*texts, "an injected </s> end <s>"]
    result = tokenize(corpus_of(write_json_lines(tmp_path / "a.jsonl", texts)), tokenizer_folder, tmp_path / "out")
    found = documents_of(tmp_path / "out")
    assert found == [[*tokenizer.encode(text), tokenizer.eos_id] for text in texts]
    assert sum(ids.count(tokenizer.eos_id) for ids in found) == len(texts)
    counts = result.manifest.counts
    assert (counts["documents"], counts["tokens"]) == (len(texts), sum(map(len, found)))
    assert counts["text_bytes"] == sum(len(text.encode()) for text in texts)


def test_workers_change_no_byte(tmp_path, texts, tokenizer_folder, monkeypatch):
    """This process and three others, over many shards."""
    monkeypatch.setattr("megalite.corpus.shards.SMALLEST_SHARD", 5_000)
    corpus = corpus_of(write_json_lines(tmp_path / "a.jsonl", texts))
    assert len(corpus.shards()) > 3
    tokenize(corpus, tokenizer_folder, tmp_path / "1")
    with LocalPool(3) as runner:
        tokenize(corpus, tokenizer_folder, tmp_path / "3", runner=runner)
    assert all_bytes(tmp_path / "1") == all_bytes(tmp_path / "3")


def test_a_tokenizer_that_was_trained_again(tmp_path, texts, tokenizer_folders):
    """Another tokenizer in the same folder: its ids, not those that this process had loaded."""
    corpus, folder = corpus_of(write_json_lines(tmp_path / "a.jsonl", texts[:5])), tmp_path / "tokenizer"
    for kind in ("byte-bpe", "sentencepiece-unigram"):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tokenizer_folders[kind], folder)
        tokenize(corpus, folder, tmp_path / kind)
        tokenizer = Tokenizer.load(folder)
        assert documents_of(tmp_path / kind) == [[*tokenizer.encode(text), tokenizer.eos_id] for text in texts[:5]]


def test_what_cannot_be_encoded_is_put_aside(tmp_path, tokenizer_folder):
    """Raw input without a cleaning station: bad and empty records are kept apart and counted."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\nbad\n{"text": ""}\n{"text": "caf\xe9"}\n')
    result = tokenize(corpus_of(path), tokenizer_folder, tmp_path / "out")
    assert result.manifest.counts["rejected"] == {"empty": 1, "not UTF-8": 1, "not a JSON object": 1}
    assert result.manifest.counts["documents"] == 1
    assert pq.read_table(tmp_path / "out" / "rejected" / "part-00000.parquet").num_rows == 3


def test_the_two_sides_of_a_split_are_the_whole(tmp_path, tokenizer_folder):
    """Train and valid share no document and lose none; the choice does not depend on the order."""
    texts = prose(400)
    write_json_lines(tmp_path / "a.jsonl", texts)
    write_json_lines(tmp_path / "b.jsonl", reversed(texts))
    sides = {}
    for name in ("a", "b"):
        for part in ("train", "valid"):
            out = tmp_path / f"{name}-{part}"
            tokenize(corpus_of(tmp_path / f"{name}.jsonl"), tokenizer_folder, out, split=CorpusSplit(part, 0.1))
            sides[name, part] = {tuple(ids) for ids in documents_of(out)}
    assert sides["a", "train"] == sides["b", "train"]
    assert sides["a", "valid"] == sides["b", "valid"]
    assert not sides["a", "train"] & sides["a", "valid"]
    assert len(sides["a", "train"] | sides["a", "valid"]) == 400
    assert 20 <= len(sides["a", "valid"]) <= 65


def test_another_tokenizer_is_other_work(tmp_path, texts, tokenizer_folders):
    """The same input encoded differently is not taken for done, and the folder says which tokenizer it needs."""
    corpus = corpus_of(write_json_lines(tmp_path / "a.jsonl", texts))
    for kind, folder in tokenizer_folders.items():
        assert not tokenize(corpus, folder, tmp_path / "out").reused
        samples = open_samples([SourceConfig(path=tmp_path / "out")], seq_len=32, seed=1, document_masks=True)
        assert samples.tokenizer_path.resolve() == folder.resolve()
        assert Tokenizer.load(samples.tokenizer_path).kind == kind
        assert samples.vocab_size == 800


def test_tokens_are_uint16_for_a_small_vocabulary(tmp_path, texts, tokenizer_folder):
    """Two bytes a token on disk."""
    tokenize(corpus_of(write_json_lines(tmp_path / "a.jsonl", texts)), tokenizer_folder, tmp_path / "out")
    tokens = IndexedTokens(tmp_path / "out" / "tokens")
    assert tokens.dtype == np.uint16
    assert (tmp_path / "out" / "tokens.bin").stat().st_size == 2 * tokens.num_tokens


@pytest.mark.parametrize(
    ("part", "fraction", "message"),
    [
        ("vaild", 0.1, r"did you mean 'valid'\?"),
        ("valid", 0.0, "give --valid-fraction"),
        ("all", 0.1, "say which side to write"),
    ],
)
def test_splits_that_cannot_be(part, fraction, message):
    """What a user may write wrongly."""
    with pytest.raises(DataError, match=message):
        parse_split(part, fraction)


def test_descriptions_do_not_fit_pieces_of_documents(tmp_path, texts, tokenizer_folder):
    """fim.level=context makes several of one document, which has one description."""
    forms = Forms(fim=FillInConfig(level="context"), seq_len=32)
    corpus = corpus_of(write_json_lines(tmp_path / "a.jsonl", texts))
    with pytest.raises(DataError, match="--describe has a line for each document"):
        tokenize(corpus, tokenizer_folder, tmp_path / "out", describe=True, forms=forms)


def tokenize_words(folder: Path, end: str) -> tuple[dict[str, Any], str]:
    """Counts, and the summary, of texts of which a vocabulary has one word."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "[SEP]": 1, "known": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", eos_token=end).save_pretrained(
        folder / "words"
    )
    corpus = corpus_of(write_json_lines(folder / "a.jsonl", ["known other", "more words known"]))
    said = Summary()
    return tokenize(corpus, folder / "words", folder / "out", progress=said).manifest.counts, said.line


def test_unknown_tokens_are_counted(tmp_path):
    """In the manifest and the summary; where every byte has a token there are none."""
    counts, said = tokenize_words(tmp_path, "[SEP]")
    assert (counts["tokens"], counts["unknown_tokens"]) == (7, 3)
    assert "3 of them (43 %) unknown" in said


def test_the_end_of_a_document_is_not_unknown(tmp_path):
    """Some vocabularies have one token for both."""
    assert "unknown_tokens" not in tokenize_words(tmp_path, "[UNK]")[0]


def test_nothing_is_unknown_to_bytes(tmp_path, tokenizer_folder):
    corpus = corpus_of(write_json_lines(tmp_path / "a.jsonl", ["ordinary words", "\u4e00"]))
    assert "unknown_tokens" not in tokenize(corpus, tokenizer_folder, tmp_path / "out").manifest.counts
