"""The comparison of tokenizers: every number against a count by hand."""

from __future__ import annotations

import io

import pytest
import sentencepiece

from megalite.errors import DataError
from megalite.texts import Texts
from megalite.tokenizer.report import bar_plot, compare_tokenizers, report_table, texts_by_source
from megalite.tokenizer.tokenizer import Tokenizer
from tests.kit.data import KINDS

SOURCES = {"prose": ["the model  reads\nthe text", "", "日本 ☃"], "numbers": ["1 22 333"]}


@pytest.fixture(scope="module")
def tokenizers(tokenizer_folders, tmp_path_factory) -> dict[str, Tokenizer]:
    """One of each kind, and one of SentencePiece's defaults, which loses text."""
    folder = tmp_path_factory.mktemp("lossy")
    sentences = ["the model reads the text and 1 2 3 numbers"] * 20 + list("abcdefghij")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_prefix=str(folder / "tokenizer"), vocab_size=28, minloglevel=2
    )
    folders = tokenizer_folders | {"lossy": folder}
    return {name: Tokenizer.load(path) for name, path in folders.items()}


def test_every_count_by_hand(tokenizers):
    """Against plain lists of ids, for each source and for all of them."""
    scores = compare_tokenizers(tokenizers, {name: Texts.of(texts) for name, texts in SOURCES.items()})
    assert [(line.tokenizer, line.source) for line in scores] == [
        (name, source) for name in tokenizers for source in ("prose", "numbers", "all")
    ]
    for line in scores:
        tokenizer = tokenizers[line.tokenizer]
        texts = [text for name, texts in SOURCES.items() for text in texts if line.source in (name, "all")]
        ids = [id for text in texts for id in tokenizer.encode(text)]
        num_words = {"prose": 7, "numbers": 3, "all": 10}[line.source]
        assert line.num_documents == len(texts)
        assert line.num_bytes == sum(len(text.encode()) for text in texts)
        assert (line.num_words, line.num_tokens) == (num_words, len(ids))
        assert line.bytes_per_token == line.num_bytes / len(ids)
        assert line.tokens_per_word == len(ids) / num_words
        assert line.num_used == len(set(ids))
        assert line.vocabulary_use == len(set(ids)) / tokenizer.vocab_size
        assert line.num_wrong == sum(tokenizer.decode(tokenizer.encode(text)) != text for text in texts)
        assert line.cpu_seconds > 0
        assert line.mb_per_second == line.num_bytes / 1e6 / line.cpu_seconds
        assert line.backend == tokenizer.backend


def test_bytes_and_unknown_tokens(tokenizers):
    """A snowman is three byte tokens with byte fallback, an unknown one without; byte-level BPE has neither."""
    scores = {line.tokenizer: line for line in compare_tokenizers(tokenizers, {"x": Texts.of(["the ☃", "☃"])})}
    for name in ("sentencepiece-bpe", "sentencepiece-unigram"):
        assert (scores[name].num_byte_tokens, scores[name].num_unknown, scores[name].num_wrong) == (6, 0, 0)
        assert scores[name].byte_share == 6 / scores[name].num_tokens
    byte_level = scores["byte-bpe"]
    assert (byte_level.num_byte_tokens, byte_level.num_unknown, byte_level.num_wrong) == (0, 0, 0)
    lossy = scores["lossy"]
    assert (lossy.num_byte_tokens, lossy.num_unknown, lossy.num_wrong) == (0, 2, 2)
    assert lossy.unknown_share == 2 / lossy.num_tokens


@pytest.mark.parametrize("kind", ["sentencepiece-bpe", "sentencepiece-unigram"])
def test_stopgaps_of_both_libraries_are_equal(tokenizers, kind):
    """tokenizer.json says the same of unknown and byte tokens as the model."""
    from megalite.tokenizer.encoders.reference import FastEncoder

    tokenizer = tokenizers[kind]
    assert FastEncoder(tokenizer.folder / "tokenizer.json").stopgaps() == tokenizer.stopgaps()
    assert tokenizer.stopgaps().unknown_id == 0
    assert len(tokenizer.stopgaps().byte_ids) == 256


def test_no_documents(tokenizers):
    """A source without text has zeros, not errors."""
    for texts in ([], [""]):
        (line,) = compare_tokenizers({"x": tokenizers[KINDS[0]]}, {"empty": Texts.of(texts)})
        assert line.num_documents == len(texts)
        assert (line.num_tokens, line.num_wrong, line.bytes_per_token, line.tokens_per_word) == (0, 0, 0.0, 0.0)
        assert line.mb_per_second == 0.0
        assert "0.000" in bar_plot([line])


def test_a_sample_of_each_source():
    """The first documents of each, to the one that reaches the size; a source may come back later."""
    documents = [(source, "x" * 40) for source in "aaaabbba"]
    texts = texts_by_source(documents, 100e-6)
    assert {source: list(found) for source, found in texts.items()} == {"a": ["x" * 40] * 3, "b": ["x" * 40] * 3}
    texts = texts_by_source(documents[3:], 100e-6)
    assert {source: len(found) for source, found in texts.items()} == {"a": 2, "b": 3}


def test_table_and_bars(tokenizers):
    """Both name every tokenizer and source; the longest bar is as wide as asked, the others in proportion."""
    from rich.console import Console

    sources = {name: Texts.of(texts) for name, texts in SOURCES.items()}
    scores = compare_tokenizers(tokenizers, sources)
    console = Console(file=io.StringIO(), width=200)
    console.print(report_table(scores))
    shown = console.file.getvalue()
    for line in scores:
        assert line.tokenizer in shown
        assert line.source in shown
        assert f"{line.bytes_per_token:.3f}" in shown
    best = max(scores, key=lambda line: line.bytes_per_token)
    rows = bar_plot(scores, width=20).splitlines()
    assert rows[0] == "bytes per token"
    assert len(rows) == 1 + 3 + len(scores)
    lengths = {float(row.split()[-1]): row.count("█") for row in rows if "█" in row}
    assert lengths[round(best.bytes_per_token, 3)] == 20
    for value, length in lengths.items():
        assert abs(length - 20 * value / best.bytes_per_token) <= 1


def test_nothing_to_compare_on():
    """A table without rows would say nothing."""
    with pytest.raises(DataError, match="there is no document to compare on"):
        texts_by_source([], 1.0)
