"""Repair over bytes: the same texts as four regular expressions give, and no copy of what needs none."""

from __future__ import annotations

import builtins
import unicodedata

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megalite.corpus.repair.kernels import UNCOMPOSED, UNTIDY, scan
from megalite.corpus.repair.normal_form import END_OF_MARKS, UNSTABLE, mark_table
from megalite.corpus.repair.repair import repair
from megalite.errors import UnavailableError
from megalite.texts import Patch, Texts, splice
from tests.corpus.repair.reference import repair_string

PIECES = (
    *("a", "word", " ", "\t", "\n", "\r", "\r\n", "\x00", "\x1f", "\x7f", "\x80", "\x84", "\x85", "\x86", "\x9f"),
    *(
        "\u00a0",
        "é",
        "ß",
        "中",
        "\u2028",
        "\u2029",
        "\u200a",
        "\u200b",
        "\u200c",
        "\u200d",
        "\u2060",
        "\u2061",
        "\ufeff",
    ),
    *("\ufefe", "\ufff8", "\ufff9", "\ufffc", "\ufffd", "😀", "\u0301", "\u0323", "\u0316", "e\u0301", "\u1100\u1161"),
    *("\uac00\u11a8", "\u09c7\u09be", "\u0958", "\u212b", "\ufb1d", "\U0001d15e", "\U0002f800", "\u0e48\u0e38"),
)
"""Every class of character that the kernel tells apart, and neighbours of each range that it must leave alone."""

texts_of_pieces = st.lists(st.sampled_from(PIECES), max_size=30).map("".join)

any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def repaired(*texts: str, **options: bool) -> list[str]:
    return list(repair(Texts.of(texts), **options))


@settings(max_examples=400, deadline=None)
@given(st.lists(texts_of_pieces | any_text, max_size=5), st.booleans())
@example(["a\u0301\u200b\u0316", "\u0316\x00\u0301"], True)
@example([" \n", "\n \n", "\u00a0\n\u00a0a", "a\n \n \n \n \nb", "", "\r\r\n\n"], True)
def test_repair_is_the_reference(texts, unicode_nfc):
    """Any texts, together, equal the reference one by one; a second repair changes nothing."""
    expected = [repair_string(text, unicode_nfc=unicode_nfc) for text in texts]
    assert repaired(*texts, unicode_nfc=unicode_nfc) == expected
    if unicode_nfc:
        assert repaired(*expected) == [repair_string(text) for text in expected]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("a\r\nb\rc\x85d\u2028e", "a\nb\nc\nd\ne"),
        ("a\x00b\x07c\ufeffd\u200be", "abcde"),
        ("tabs\tstay\n    indents stay", "tabs\tstay\n    indents stay"),
        ("blanks at the end   \t\nof lines\u00a0 ", "blanks at the end\nof lines"),
        ("a\n\n\nb\n\n\n\n\n\nc", "a\n\n\nb\n\n\nc"),
        ("\n\n  first line keeps its indent\n\n", "  first line keeps its indent"),
        ("e\u0301", "\u00e9"),
        ("👨\u200d👩\u200d👧", "👨\u200d👩\u200d👧"),
    ],
)
def test_examples(raw, expected):
    """Each repair by hand, and what it must leave alone."""
    assert repaired(raw) == [expected]


def test_every_character_alone_and_between_letters():
    """All of Unicode, one character a text."""
    characters = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    for step, frame in ((1, "{}"), (7, "a{}b\n{} ")):
        texts = [frame.format(character, character) for character in characters[::step]]
        assert repaired(*texts) == [repair_string(text) for text in texts]


def test_clean_texts_are_not_copied():
    """A batch that needs nothing comes back as it is; one bad text among them is the only one that changes."""
    texts = Texts.of(["good", "schön", "two\n\nlines", "한국어 中文 ไทย"])
    assert repair(texts) is texts
    assert repaired("good", "bad ", "schön") == ["good", "bad", "schön"]


def test_texts_that_do_not_begin_at_zero():
    """A slice of a column, as Arrow gives it."""
    whole = Texts.of(["\nbefore ", "bad \r\n", "e\u0301", "after \n"])
    assert list(repair(Texts(whole.buffer, whole.offsets[1:4]))) == ["bad", "é"]
    assert list(repair(Texts(whole.buffer, whole.offsets[:1]))) == []


def test_long_runs_are_linear():
    """Millions of blanks, of line ends and of marks, which would take minutes if each were tried as a beginning."""
    size = 2_000_000
    blanks, lines, marks = "a" + " " * size + "b", "a" + " \n" * size + "b", "a" + "\u0323" * (size // 10)
    assert repaired(blanks, lines, marks) == [blanks, "a\n\n\nb", unicodedata.normalize("NFC", marks)]


def test_flags_are_exact_for_tidiness_and_safe_for_the_form():
    """UNTIDY stands exactly where the strings change; where UNCOMPOSED is missing, the text is in the form."""
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(PIECES, rng.integers(0, 8))) for _ in range(5000)]
    batch = Texts.of(texts)
    flags = scan(batch.buffer, batch.offsets, mark_table(), True)
    for text, flag in zip(texts, flags.tolist(), strict=True):
        tidied = repair_string(text, unicode_nfc=False)
        assert bool(flag & UNTIDY) == (tidied != text)
        assert flag & UNCOMPOSED or unicodedata.is_normalized("NFC", tidied)


def test_the_table_of_marks_covers_unicode():
    """Beyond the table nothing changes or joins; inside, whatever joins some character before it is unstable."""
    table = mark_table()
    for code in (*range(0x300), *range(END_OF_MARKS, 0x110000)):
        character = chr(code)
        assert unicodedata.combining(character) == 0
        assert unicodedata.normalize("NFC", character) == character or 0xD800 <= code < 0xE000
    for code in range(0xA0, END_OF_MARKS):
        parts = unicodedata.normalize("NFD", chr(code))
        for part in parts[1:]:
            joins = unicodedata.normalize("NFC", parts) == chr(code) and len(parts) > 1
            assert table[ord(part)] == UNSTABLE or not joins
        if unicodedata.normalize("NFC", chr(code)) != chr(code):
            assert table[code] == UNSTABLE


def test_splice():
    """Patches of any size, at borders of documents and empty ones, against slices of bytes."""
    texts = Texts.of(["abc", "", "defgh", "i"])
    patches = [Patch(0, 0, 1, b"XYZ"), Patch(2, 3, 3, b"+"), Patch(2, 5, 8, b""), Patch(3, 8, 9, b"!")]
    assert list(splice(texts, patches)) == ["XYZbc", "", "+de", "!"]
    behind = [patch._replace(document=patch.document - 2) for patch in patches[1:]]
    assert list(splice(Texts(texts.buffer, texts.offsets[2:]), behind)) == ["+de", "!"]
    assert splice(texts, []) is texts


def test_mojibake():
    """Lines that were decoded with the wrong table are set right, each by itself; good ones of any script stay."""
    pytest.importorskip("ftfy")
    wrong = "schön und größer – “quoted”".encode().decode("windows-1252", errors="replace")
    text = f"Ünïcödé stays\n{'schön'.encode().decode('latin-1')} ist es\n中文也留下\nplain"
    assert repaired(text, "ascii", "größer", fix_encoding=True) == [
        "Ünïcödé stays\nschön ist es\n中文也留下\nplain",
        "ascii",
        "größer",
    ]
    assert "schön und größer" in repaired(wrong, fix_encoding=True)[0]
    assert repaired(text)[0] == text


def test_mojibake_at_borders():
    """First and last lines, and texts that do not begin at zero."""
    pytest.importorskip("ftfy")
    bad, good = "schÃ¶n", "schön"
    whole = Texts.of([bad, f"{bad}\nx\n{bad}", "", bad])
    assert list(repair(whole, fix_encoding=True)) == [good, f"{good}\nx\n{good}", "", good]
    assert list(repair(Texts(whole.buffer, whole.offsets[1:3]), fix_encoding=True)) == [f"{good}\nx\n{good}"]


def test_without_ftfy(monkeypatch):
    """What is missing is named, with the way to get it; the other repairs do without."""
    real_import = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.split(".")[0] == "ftfy":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UnavailableError, match=r"fix_encoding needs ftfy: pip install 'megalite\[data\]'"):
        repaired("é", fix_encoding=True)
    assert repaired("é ") == ["é"]
