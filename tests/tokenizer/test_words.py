"""The parts under the fast encoders: where words end, hash tables, arrays of ids."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.tokenizer.encoders.byte_level import ASCII_END, character_classes, next_hard_word, pair_rules
from megalite.tokenizer.encoders.check import TRICKY_TEXTS
from megalite.tokenizer.encoders.cuts import cuts_between
from megalite.tokenizer.encoders.reference import end_texts, lay_out
from megalite.tokenizer.encoders.short_words import eight_bytes, first_bytes, letters_size
from megalite.tokenizer.encoders.utf8 import char_size, code_point
from megalite.tokenizer.encoders.vocabulary import CUT, HARD, JOIN, find, make_table
from tests.tokenizer.real_texts import library_texts, scrambled_texts


def test_no_piece_reaches_across_a_cut():
    """Every two neighbours in a piece join, a blank in both its forms; all other characters part."""
    pieces = ["ab", "▁the", "é", "日本", "▁▁", "x"]
    rules = cuts_between(pieces)

    def rule(left: str, right: str) -> int:
        return rules[256 * left.encode()[-1] + right.encode()[0]]

    for left, right in ("ab", " t", "▁t", "th", "he", "日本", "  ", " ▁", "▁ ", "▁▁"):
        assert rule(left, right) == JOIN
    for left, right in ("ba", "xx", "e ", "e▁", "aé", "b日", "ét"):
        assert rule(left, right) == CUT


@pytest.mark.parametrize("kind", ["sentencepiece-bpe", "sentencepiece-unigram"])
def test_a_real_vocabulary_has_no_cut_inside_a_piece(tokenizer_folders, kind):
    """Byte by byte over all pieces of text; and there are cuts, or words would be whole documents."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer_folders[kind] / "tokenizer.model"))
    special = (processor.is_control, processor.is_unknown, processor.is_byte)
    ids = [id for id in range(processor.vocab_size()) if not any(is_special(id) for is_special in special)]
    pieces = [processor.id_to_piece(id) for id in ids]
    rules = cuts_between(pieces)
    for piece in pieces:
        for form in (piece, piece.replace("▁", " ")):
            assert all(rules[256 * left + right] == JOIN for left, right in pairwise(form.encode()))
    assert [rules[256 * left + right] for left, right in (b"a ", b")a", b"1a", b"12")] == [CUT] * 4


@pytest.fixture(scope="module", params=[False, True], ids=["whole numbers", "split digits"])
def pattern(request):
    """The library's splitter of words, and our arrays for it."""
    from tokenizers import pre_tokenizers

    steps = [pre_tokenizers.Digits(individual_digits=True)] if request.param else []
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True))
    return pre_tokenizers.Sequence(steps), character_classes(split_digits=request.param)


def library_words(splitter, text: str) -> list[str]:
    return [text[start:stop] for _, (start, stop) in splitter.pre_tokenize_str(text)]


def hard_words(text: str, classes: np.ndarray) -> list[str]:
    """By the pattern alone."""
    data = text.encode()
    buffer, start, words = np.frombuffer(data, np.uint8), 0, []
    while start < len(data):
        end = next_hard_word(buffer, start, len(data), classes)
        words.append(data[start:end].decode())
        start = end
    return words


def ruled_words(text: str, classes: np.ndarray) -> list[str]:
    """By the rules of pairs, and the pattern where they say HARD."""
    rules, data = pair_rules(classes), text.encode()
    buffer, start, words = np.frombuffer(data, np.uint8), 0, []
    while start < len(data):
        end = start + 1
        while end < len(data) and rules[256 * data[end - 1] + data[end]] == JOIN:
            end += 1
        if end < len(data) and rules[256 * data[end - 1] + data[end]] == HARD:
            end = next_hard_word(buffer, start, len(data), classes)
        words.append(data[start:end].decode())
        start = end
    return words


def test_words_are_the_librarys(pattern):
    """GPT-2's pattern on thousands of texts, with the rules of pairs and without."""
    splitter, classes = pattern
    for text in [*TRICKY_TEXTS, *library_texts()[:300], *scrambled_texts()]:
        expected = library_words(splitter, text)
        assert hard_words(text, classes) == expected
        assert ruled_words(text, classes) == expected


def test_all_short_texts_of_the_difficult_characters(pattern):
    """Every text of four characters out of ten: blanks, apostrophes with endings, digits, letters, brackets."""
    splitter, classes = pattern
    letters = " \n'ser7(é\u00a0"
    texts = [a + b + c + d for a in letters for b in letters for c in letters for d in letters]
    for text in texts:
        expected = library_words(splitter, text)
        assert hard_words(text, classes) == expected, text
        assert ruled_words(text, classes) == expected, text


def test_short_words_without_a_loop(pattern):
    """Every byte of ASCII and some beyond, at every place of eight bytes of letters: the pattern's word, or none."""
    _, classes = pattern
    others = [*map(chr, range(ASCII_END)), "é", "漢", "\u00a0"]
    texts = [lead + "Zabyz" * 2 for lead in ("", " ", "  ", "'")]
    texts = [text[:place] + other + text[place:] for text in texts for place in range(9) for other in others]
    num_found = 0
    for text in texts:
        buffer = np.frombuffer(text.encode(), np.uint8)
        word = np.uint64(eight_bytes(buffer, 0))
        assert int(word) == int.from_bytes(buffer[:8].tobytes(), "little")
        size = letters_size(word)
        num_found += size > 0
        assert size in (0, next_hard_word(buffer, 0, buffer.size, classes)), text
        for length in range(1, 9):
            assert int(first_bytes(word, length)) == int.from_bytes(buffer[:length].tobytes(), "little")
    assert num_found > len(texts) / 4


def test_characters_in_a_buffer():
    """Size and code point of characters at every border of UTF-8's lengths."""
    chars = [chr(point) for point in (0, 0x7F, 0x80, 0x7FF, 0x800, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x10FFFF)]
    buffer, at = np.frombuffer("".join(chars).encode(), np.uint8), 0
    for char in chars:
        assert code_point(buffer, at) == ord(char)
        assert char_size(buffer[at]) == len(char.encode())
        at += len(char.encode())


@given(st.dictionaries(st.integers(0, 2**62), st.integers(0, 2**62), max_size=80), st.lists(st.integers(0, 2**62)))
@settings(max_examples=100, deadline=None)
def test_tables_are_dictionaries(entries, others):
    """Keys that are there and keys that are not."""
    table = make_table(np.array(list(entries), np.int64), np.array(list(entries.values()), np.int64))
    for key in [*entries, *others]:
        assert find(table, key) == entries.get(key, -1)


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=8))
@settings(max_examples=100, deadline=None)
def test_arrays_of_ids(rows):
    """Laying out and ending rows, against lists."""
    dtype = np.dtype(np.uint16)
    tokens, lengths = lay_out(rows, dtype, None)
    assert tokens.tolist() == [id for row in rows for id in row]
    assert lengths.tolist() == [len(row) for row in rows]
    for found in (lay_out(rows, dtype, 7), end_texts(tokens, lengths, 7)):
        assert found[0].tolist() == [id for row in rows for id in [*row, 7]]
        assert found[1].tolist() == [len(row) + 1 for row in rows]
        assert found[0].dtype == dtype
