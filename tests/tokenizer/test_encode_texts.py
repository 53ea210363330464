"""The fast encoders give the ids of the libraries: on real texts, on scrambled ones, on anything hypothesis finds."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.corpus.stations.train_tokenizer import train_tokenizer
from megalite.texts import Texts
from megalite.tokenizer.encoders import choose, giga, giga_unicode, word_cache
from megalite.tokenizer.encoders.check import TRICKY_TEXTS, first_difference
from megalite.tokenizer.settings import TokenizerConfig
from megalite.tokenizer.tokenizer import Tokenizer, token_dtype
from tests.kit.data import KINDS, corpus_of, write_json_lines
from tests.tokenizer.real_texts import library_texts, scrambled_texts, texts_of_numbers


@pytest.fixture(scope="module")
def tokenizers(tokenizer_folders, tmp_path_factory) -> dict[str, Tokenizer]:
    """One of each kind, and byte-level BPE with whole numbers."""
    folder = tmp_path_factory.mktemp("plain") / "byte-bpe"
    corpus = corpus_of(write_json_lines(folder.parent / "texts.jsonl", library_texts()))
    train_tokenizer(corpus, folder, TokenizerConfig(kind="byte-bpe", vocab_size=3000, split_digits=False))
    folders = tokenizer_folders | {"byte-bpe, whole numbers": folder}
    return {name: Tokenizer.load(folder) for name, folder in folders.items()}


NAMES = (*KINDS, "byte-bpe, whole numbers")


def without_gigatoken(monkeypatch) -> None:
    """As if it were not installed."""
    monkeypatch.setitem(sys.modules, "gigatoken", None)


def rows(tokens: np.ndarray, lengths: np.ndarray) -> list[list[int]]:
    return [row.tolist() for row in np.split(tokens, np.cumsum(lengths)[:-1])] if lengths.size else []


def compiled(tokenizer: Tokenizer):
    """The word cache of a tokenizer, whatever it would choose itself."""
    path = tokenizer.folder / ("tokenizer.json" if tokenizer.kind == "byte-bpe" else "tokenizer.model")
    make = choose._word_cache_of_json if tokenizer.kind == "byte-bpe" else choose._word_cache_of_model
    return make(path, tokenizer._reference)


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_the_library(tokenizers, name):
    """Thousands of texts, in batches of several sizes, against the library one text at a time."""
    tokenizer, encoder = tokenizers[name], compiled(tokenizers[name])
    texts = [*TRICKY_TEXTS, *library_texts(), *scrambled_texts()]
    expected = tokenizer.encode_batch(texts)
    dtype = token_dtype(tokenizer.vocab_size)
    for size in (len(texts), 101):
        found = []
        for start in range(0, len(texts), size):
            found += rows(*encoder.encode_texts(Texts.of(texts[start : start + size]), dtype, None))
        for text, ids, expected_ids in zip(texts, found, expected, strict=True):
            assert ids == expected_ids, text


@pytest.mark.parametrize("name", NAMES)
def test_tokenizer_uses_the_fast_encoder(tokenizers, name, monkeypatch):
    """The tokenizer's own choice, with end-of-text ids and without; equal lists, lengths and types."""
    tokenizer = tokenizers[name]
    texts = ["", *library_texts()[:200], ""]
    tokens, lengths = tokenizer.encode_texts(Texts.of(texts))
    assert tokenizer.backend in ("word-cache", "gigatoken")
    assert tokens.dtype == token_dtype(tokenizer.vocab_size)
    assert lengths.dtype == np.int64
    expected = tokenizer.encode_batch(texts)
    assert rows(tokens, lengths) == expected
    ended = rows(*tokenizer.encode_texts(Texts.of(texts), with_eos=True))
    assert ended == [[*ids, tokenizer.eos_id] for ids in expected]
    tokens, lengths = tokenizer.encode_texts(Texts.of([]), with_eos=True)
    assert tokens.size == lengths.size == 0


@given(text=st.text(max_size=80))
@settings(max_examples=400, deadline=None)
def test_any_text(tokenizers, text):
    """Arbitrary Unicode, all kinds, each text twice in one batch so that the second is from memory."""
    for tokenizer in tokenizers.values():
        expected = tokenizer.encode(text)
        tokens, lengths = tokenizer.encode_texts(Texts.of([text, text]))
        assert rows(tokens, lengths) == [expected, expected]


@pytest.mark.parametrize("name", NAMES)
def test_a_full_cache_starts_over(tokenizers, name, monkeypatch):
    """A cache so small that it is emptied all the time changes no id."""
    monkeypatch.setattr(word_cache, "NUM_SLOTS", 64)
    monkeypatch.setattr(word_cache, "FRONT_ROWS", 32)
    monkeypatch.setattr(word_cache, "ARENA_BYTES", 300)
    monkeypatch.setattr(word_cache, "ARENA_IDS", 200)
    tokenizer, encoder = tokenizers[name], compiled(tokenizers[name])
    texts = [*scrambled_texts()[:1000], *library_texts()[:200]]
    tokens, lengths = encoder.encode_texts(Texts.of(texts), token_dtype(tokenizer.vocab_size), None)
    assert rows(tokens, lengths) == tokenizer.encode_batch(texts)
    assert 0 < encoder._cache.used[0] <= 32


@pytest.mark.parametrize("name", NAMES)
def test_words_longer_than_most_texts(tokenizers, name):
    """One run of letters beyond every bound of the cache, before and behind ordinary words."""
    texts = ["short", "before " + "ab" * (word_cache.USUAL_WORD // 2 + 1000) + " behind", "x" * 70_000, "end"]
    found = rows(*compiled(tokenizers[name]).encode_texts(Texts.of(texts), np.dtype(np.uint16), None))
    assert found == tokenizers[name].encode_batch(texts)


def test_texts_in_the_middle_of_a_buffer(tokenizers):
    """Offsets need not begin at 0, nor end with the buffer."""
    texts = library_texts()[:50]
    whole = Texts.of(texts)
    for tokenizer in tokenizers.values():
        tokens, lengths = tokenizer.encode_texts(Texts(whole.buffer, whole.offsets[10:40]))
        assert rows(tokens, lengths) == tokenizer.encode_batch(texts[10:39])


def test_long_unigram_texts_are_exact(tokenizers):
    """Sums of scores far beyond what float32 holds: the library's ids, and those of the same words in short texts."""
    tokenizer = tokenizers["sentencepiece-unigram"]
    long = "".join(library_texts())
    long *= -(-1_500_000 // len(long))
    texts = ["short", long, long[:1000], long[5:], "end"]
    tokens, lengths = tokenizer.encode_texts(Texts.of(texts), with_eos=True)
    assert tokenizer.backend == "word-cache"
    assert rows(tokens, lengths) == [[*ids, tokenizer.eos_id] for ids in tokenizer.encode_batch(texts)]


def test_a_library_that_rounds_encodes_by_itself(tokenizers, monkeypatch):
    """SentencePiece before 0.2.2: its ids in long texts are its own."""
    monkeypatch.setattr("sentencepiece.__version__", "0.2.1")
    tokenizer = Tokenizer.load(tokenizers["sentencepiece-unigram"].folder)
    tokenizer.encode_texts(Texts.of(["a text"]))
    assert tokenizer.backend == "sentencepiece"
    assert "sentencepiece 0.2.1 rounds" in tokenizer._choice[1]["word-cache"]


@pytest.mark.parametrize("name", NAMES)
def test_text_never_becomes_a_control_token(tokenizers, name, monkeypatch):
    """Token injection, in every encoder that this machine has."""
    tokenizer = tokenizers[name]
    control = {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id}
    texts = Texts.of(["<s>", "</s>", "<pad>", "a</s>b <s> <pad></s>", "<unk><0x0A>"])
    dtype = token_dtype(tokenizer.vocab_size)
    for encoder in (tokenizer._choice[0], compiled(tokenizer), tokenizer._reference):
        tokens, lengths = encoder.encode_texts(texts, dtype, None)
        assert not control.intersection(tokens.tolist())
        assert [tokenizer.decode(ids) for ids in rows(tokens, lengths)] == list(texts)


def test_without_gigatoken_the_ids_are_the_same(tokenizers, monkeypatch):
    """The optional package is missing: another encoder, the reason, the same ids."""
    folder = tokenizers["byte-bpe, whole numbers"].folder
    without_gigatoken(monkeypatch)
    tokenizer = Tokenizer.load(folder)
    texts = Texts.of(library_texts()[:100])
    tokens, _ = tokenizer.encode_texts(texts)
    assert tokenizer.backend == "word-cache"
    assert "pip install gigatoken" in tokenizer._choice[1]["gigatoken"]
    assert np.array_equal(tokens, tokenizers["byte-bpe, whole numbers"].encode_texts(texts)[0])


@pytest.mark.parametrize("name", ["byte-bpe", "byte-bpe, whole numbers"])
def test_gigatoken_agrees_on_thousands_of_texts(tokenizers, name):
    """Where it is installed: the ids of the reference, though the package reads control tokens out of text, and does
    not know what splits digits."""
    pytest.importorskip("gigatoken")
    tokenizer = tokenizers[name]
    texts = [*TRICKY_TEXTS, *library_texts(), *scrambled_texts(), *texts_of_numbers()]
    assert rows(*tokenizer.encode_texts(Texts.of(texts))) == tokenizer.encode_batch(texts)
    assert tokenizer.backend == "gigatoken"


@pytest.mark.parametrize("name", ["byte-bpe", "byte-bpe, whole numbers"])
def test_every_character_is_the_same_to_gigatoken(tokenizers, name):
    """All of Unicode, each beside what shows whether it is a letter, a number or a blank: the package has another
    version of it, and the reference gets what differs."""
    pytest.importorskip("gigatoken")
    tokenizer = tokenizers[name]
    points = [*range(0xD800), *range(0xE000, 0x40000), *range(0xE0000, 0xE0200), 0xF0000, 0x10FFFF]
    texts = ["".join(f"{chr(point)}'s{chr(point)}a1 {chr(point)}\n" for point in points[n : n + 64]) for n in
             range(0, len(points), 64)]  # fmt: skip
    assert tokenizer.backend == "gigatoken"
    for text, ids in zip(texts, rows(*tokenizer.encode_texts(Texts.of(texts))), strict=True):
        assert ids == tokenizer.encode(text), hex(ord(text[0]))


@pytest.fixture(scope="module")
def num_ids() -> Callable[[bytes], int]:
    """How many ids the library has for a text, with the probe's vocabulary; kept, for all texts are asked for again."""
    import tokenizers as library

    probe = library.Tokenizer.from_str(giga_unicode.probe_json())
    return cache(lambda text: len(probe.encode(text.decode()).ids))


@pytest.mark.parametrize(("char", "like"), [("€", "क"), ("क", "€"), ("１", "€"), ("\u3000", "क"), ("é", "½")])
def test_a_character_that_is_not_the_same_is_found(num_ids, char, like):
    """One that the package takes for a letter, say, and the reference does not; and with none there is none."""
    unknown = giga_unicode.unknown_characters()

    def count(texts: list[bytes], char: str = char) -> np.ndarray:
        return np.array([num_ids(text.replace(char.encode(), like.encode())) for text in texts])

    found = giga_unicode.doubtful_characters(count) & ~unknown
    assert [chr(point) for point in np.flatnonzero(found)] == [char]
    assert np.array_equal(giga_unicode.doubtful_characters(lambda texts: count(texts, like)), unknown)


def test_gigatoken_begins_anew_before_it_remembers_too_much(tokenizers, monkeypatch):
    """Its memory of words has no bound of its own; the ids do not change."""
    pytest.importorskip("gigatoken")
    monkeypatch.setattr(giga, "RENEWED_AFTER", 20_000)
    tokenizer = tokenizers["byte-bpe"]
    encoder = choose._gigatoken(tokenizer.folder / "tokenizer.json", tokenizer._reference)
    used = set()
    for texts in (library_texts()[start : start + 20] for start in range(0, 200, 20)):
        assert rows(*encoder.encode_texts(Texts.of(texts), np.dtype(np.uint16), None)) == tokenizer.encode_batch(texts)
        used.add(encoder._tokenizer)
        assert encoder._num_bytes <= max(20_000, Texts.of(texts).num_bytes)
    assert len(used) > 3


def test_texts_are_cut_where_numbers_matter(tokenizers):
    """Before a digit behind two blanks and more, or what is not ASCII, and around numbers beyond it; nowhere else."""
    pytest.importorskip("gigatoken")
    tokenizer = tokenizers["byte-bpe"]
    encoder = choose._gigatoken(tokenizer.folder / "tokenizer.json", tokenizer._reference)
    expected = [
        ["a 1 23, b"],
        [""],
        ["x  ", "12\u3000 ", "3"],
        ["9"],
        ["é", "7"],
        ["½", "¼", "y"],
        ["z ", "½", " ", "4"],
        ["  ", "5"],
    ]
    texts = Texts.of(["".join(pieces) for pieces in expected])
    pieces, counts = giga._cut(texts, encoder._classes)
    assert [list(each) for each in np.split(np.array(list(pieces), object), np.cumsum(counts)[:-1])] == expected
    for place in range(200):  # whole chunks are passed over at once
        long = [["x" * place + "  ", "7" + "y" * (300 - place)], ["x" * place, "½", "y" * 200]][place % 2 :]
        pieces, _ = giga._cut(Texts.of(["".join(each) for each in long]), encoder._classes)
        assert list(pieces) == [piece for each in long for piece in each if piece]
    columns = Texts.of(["  7" * 5000])
    assert len(giga._cut(columns, encoder._classes)[0]) == 5001, "more than there is room for at first"


@pytest.mark.parametrize("change", ["joined", "added", "normalized"])
def test_digits_that_are_more_than_split_are_not_for_gigatoken(tokenizers, tmp_path, change):
    """A token of several digits, one that is matched in the text, a normaliser: cut at numbers, ids would be others."""
    content = json.loads((tokenizers["byte-bpe"].folder / "tokenizer.json").read_text(encoding="utf-8"))
    if change == "joined":
        content["model"]["vocab"]["12"] = len(content["model"]["vocab"])
        content["model"]["merges"].append(["1", "2"])
    elif change == "added":
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        content["added_tokens"].append({"id": 5000, "content": "a  1", **flags})
    else:
        content["normalizer"] = {"type": "NFKC"}
    with pytest.raises(giga.Unsupported, match="splits digits, but"):
        giga.GigatokenEncoder(json.dumps(content), tokenizers["byte-bpe"]._reference)


def test_an_encoder_that_differs_is_not_used(tokenizers, monkeypatch):
    """The check finds one wrong id in one text; the library takes over, and the reason is kept."""
    right = word_cache.WordCacheEncoder.encode_texts

    def wrong(self, texts, dtype, eos_id):
        tokens, lengths = right(self, texts, dtype, eos_id)
        tokens = tokens.copy()
        tokens[tokens.size // 2] += 1
        return tokens, lengths

    monkeypatch.setattr(word_cache.WordCacheEncoder, "encode_texts", wrong)
    tokenizer = Tokenizer.load(tokenizers["sentencepiece-bpe"].folder)
    assert tokenizer.backend == "sentencepiece"
    assert "other ids than sentencepiece" in tokenizer._choice[1]["word-cache"]
    texts = library_texts()[:5]
    assert rows(*tokenizer.encode_texts(Texts.of(texts), with_eos=True)) == [
        [*ids, tokenizer.eos_id] for ids in tokenizer.encode_batch(texts)
    ]


def test_the_check_covers_what_an_encoder_remembers(tokenizers):
    """A reference agrees with itself, by either path."""
    for tokenizer in tokenizers.values():
        assert first_difference(tokenizer._reference, tokenizer._reference, np.dtype(np.uint16)) is None


def test_models_that_work_otherwise_go_to_their_library(tmp_path):
    """SentencePiece's own defaults (a blank in front, normalisation, no bytes): encoded by it, and the reason kept."""
    import sentencepiece

    texts = library_texts()[:300]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in texts for line in text.splitlines()),
        model_prefix=str(tmp_path / "tokenizer"), vocab_size=400, minloglevel=2,
    )  # fmt: skip
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.backend == "sentencepiece"
    reason = tokenizer._choice[1]["word-cache"]
    assert all(part in reason for part in ("normalises", "a blank in front", "no byte fallback"))
    assert rows(*tokenizer.encode_texts(Texts.of(texts[:20]))) == tokenizer.encode_batch(texts[:20])


def test_a_tokenizer_json_with_text_tokens_goes_to_its_library(tokenizers, tmp_path, monkeypatch):
    """Added tokens that are matched in text are beyond the word cache."""
    import tokenizers as library

    without_gigatoken(monkeypatch)
    shutil.copytree(tokenizers["byte-bpe"].folder, tmp_path / "changed")
    (tmp_path / "changed" / "megalite_tokenizer.json").unlink()
    path = tmp_path / "changed" / "tokenizer.json"
    changed = library.Tokenizer.from_file(str(path))
    changed.add_tokens(["import"])
    changed.save(str(path))
    tokenizer = Tokenizer.load(tmp_path / "changed")
    assert tokenizer.backend == "tokenizers"
    assert tokenizer._choice[1]["word-cache"] == "it has added tokens that are text"
    assert tokenizer.encode("import")[0] == tokenizer.vocab_size - 1
    assert rows(*tokenizer.encode_texts(Texts.of(["import", "a"]))) == tokenizer.encode_batch(["import", "a"])
