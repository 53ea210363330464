"""What `compat: datatrove` counts, against strings: with a cutter of our own, since spaCy is asked in `oracles/`."""

from __future__ import annotations

import re
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.corpus.recipe import CleanConfig
from megalite.corpus.rules import lexicon as lexicons
from megalite.corpus.rules.c4 import edit_lines
from megalite.corpus.rules.columns import COLUMNS
from megalite.corpus.rules.datatrove import measure_as_datatrove
from megalite.corpus.rules.english import English
from megalite.corpus.rules.gopher import quality_rules, repetition_rules
from megalite.corpus.rules.lexicon import Lexicon
from megalite.corpus.rules.punctuation import PUNCTUATION_MARKS
from megalite.corpus.rules.settings import (
    C4Config,
    FineWebConfig,
    GopherQualityConfig,
    GopherRepetitionConfig,
    RulesConfig,
    counts_as_datatrove,
)
from megalite.corpus.rules.statistics import no_statistics
from megalite.corpus.stations.clean import clean
from megalite.errors import ConfigError, UnavailableError
from megalite.texts import Texts
from tests.corpus.rules.reference import top_chars
from tests.corpus.rules.samples import TRAPS, library_texts, random_texts
from tests.kit.data import corpus_of, prose, write_json_lines

CONFIG = RulesConfig(
    c4=C4Config(compat="datatrove"),
    gopher_quality=GopherQualityConfig(compat="datatrove", stop_words=("the", "of", "n", "a")),
    gopher_repetition=GopherRepetitionConfig(compat="datatrove"),
    fineweb=FineWebConfig(compat="datatrove"),
)

END_MARKS = {".", "!", "?", "。"}

CASES = {"cannot": ["can", "not"], "ab": ["a", "b"], "Its": ["It", "s"]}


def cut(chunk: str) -> list[str]:
    """Runs of letters and digits, and marks; some special cases."""
    return [part for word in re.findall(r"\w+|\W", chunk) for part in CASES.get(word, [word])]


def plain() -> Lexicon:
    return Lexicon(cut, list(CASES), END_MARKS)


def measured(texts: list[str], lexicon: Lexicon | None = None, config: RulesConfig = CONFIG) -> list[dict]:
    statistics = no_statistics(len(texts))
    measure_as_datatrove(Texts.of(texts), statistics, config, lexicon or plain())
    return [dict(zip(COLUMNS, row, strict=True)) for row in statistics.tolist()]


def expected(text: str) -> dict:
    """The same over strings, as datatrove's filters have it."""
    words = [word for chunk in text.split() for word in cut(chunk)]
    no_symbols = [word for word in words if not PUNCTUATION_MARKS.issuperset(word)]
    lines, paragraphs = re.split(r"\n+", text), re.split(r"\n{2,}", text.strip())
    terminal = tuple(CONFIG.fineweb.terminal_characters)
    return {
        "tokens": len(words),
        "tokens_with_letter": sum(any(map(str.isalpha, word)) for word in words),
        "word_tokens": len(no_symbols),
        "word_token_chars": sum(map(len, no_symbols)),
        "word_token_stop_words": len(set(words) & set(CONFIG.gopher_quality.stop_words)),
        **{f"top_{n}gram_chars": top_chars(words, n) for n in (2, 3, 4)},
        **{f"duplicate_{n}gram_chars": joined_run_chars(words, n) for n in range(5, 11)},
        "split_lines": len(lines),
        **duplicates("duplicate_split_line", lines),
        "paragraphs": len(paragraphs),
        **duplicates("duplicate_paragraph", paragraphs),
        "terminal_lines": sum(line.endswith(terminal) for line in text.split("\n") if line.strip()),
        "sentences": sum(map(sentences, text.removesuffix("\n").split("\n"))) if text else 0,
    }


def joined_run_chars(words: list[str], n: int) -> int:
    read, at, chars = set(), 0, 0
    while at + n <= len(words):
        run = "".join(words[at : at + n])
        if run in read:
            chars += len(run)
            at += n
        else:
            read.add(run)
            at += 1
    return chars


def duplicates(name: str, pieces: list[str]) -> dict:
    repeated = [piece for place, piece in enumerate(pieces) if piece in pieces[:place]]
    return {f"{name}s": len(repeated), f"{name}_chars": sum(map(len, repeated))}


def sentences(line: str) -> int:
    """spaCy's sentencizer: blanks are words too, but for one blank behind a word."""
    words: list[str] = []
    for blanks, chunk in re.findall(r"(\s*)(\S*)", line):
        blanks = blanks[1:] if words and blanks.startswith(" ") else blanks
        words += ([blanks] if blanks else []) + (cut(chunk) if chunk else [])
    count, has_ended = 1, False
    for word in words:
        is_punctuation = all(unicodedata.category(each)[0] == "P" for each in word)
        if has_ended and not is_punctuation and word not in END_MARKS:
            count, has_ended = count + 1, False
        elif word in END_MARKS:
            has_ended = True
    return count


def assert_as_expected(texts: list[str]) -> None:
    for text, row in zip(texts, measured(texts), strict=True):
        wanted = expected(text)
        assert {name: row[name] for name in wanted} == wanted, text[:300]


def test_traps():
    """Hand-made texts, and more of them where words, lines and sentences are odd."""
    assert_as_expected(
        [
            *TRAPS,
            *("ab c d e f g a bc d e f g", "cannot cannot, Its", "=" * 50, "a. b? c.) d", "End.  Next", "End.\tNext"),
            *("End. ", "x.  ", " \n \na\n \n a", "a\n\nb\n\na\n\n\nb", "\n\na", "a\n\n", "...", "a.(b", "?!x", "。x"),
        ]
    )


def test_library_texts():
    """Sources of Python's library."""
    assert_as_expected(library_texts(10, 8000))


@settings(max_examples=150, deadline=None)
@given(st.lists(random_texts, max_size=4))
def test_random_texts(texts):
    """Any Unicode, several documents at once."""
    assert_as_expected([text.encode(errors="ignore").decode() for text in texts])


def test_a_lexicon_grows_and_forgets(monkeypatch):
    """More chunks than there is room for at first; what was forgotten is learnt again. The figures stay."""
    monkeypatch.setattr(lexicons, "CHUNKS_AT_ONCE", 64)
    monkeypatch.setattr(lexicons, "MAX_CHUNKS", 300)
    texts = [" ".join(f"w{seed}x{number}, cannot" for number in range(150)) for seed in range(8)] + ["a" * 200 + "1."]
    asked: list[str] = []

    def counting(chunk: str) -> list[str]:
        asked.append(chunk)
        return cut(chunk)

    lexicon = Lexicon(counting, list(CASES), END_MARKS)
    once = [measured([text], lexicon)[0] for text in texts]
    assert once == measured(texts)
    num_asked = len(asked)
    assert asked.count("cannot") > 1  # one of the special cases: they were learnt again
    lexicon.learn(Texts.of(["new1 new2 new1 cannot letters"]))
    assert asked[num_asked:] in (["new1", "new2"], [*CASES, "new1", "new2"])


def test_texts_that_do_not_begin_at_zero():
    """A slice of a column, as Arrow gives it."""
    whole = Texts.of(["x y z.", "cannot be", "the end."])
    statistics = no_statistics(2)
    measure_as_datatrove(Texts(whole.buffer, whole.offsets[1:]), statistics, CONFIG, plain())
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in statistics.tolist()]
    assert rows == measured(["cannot be", "the end."])


def test_defaults_are_datatroves():
    """Those that differ, unless they are given; and they survive a way through JSON, which tasks take."""
    c4 = C4Config(compat="datatrove")
    assert (c4.min_words_per_line, c4.min_sentences) == (3, 5)
    assert (C4Config().min_words_per_line, C4Config().min_sentences) == (5, 3)
    assert C4Config(compat="datatrove", min_sentences=3).min_sentences == 3
    assert "。" in FineWebConfig(compat="datatrove").terminal_characters
    assert '"' not in FineWebConfig(compat="datatrove").terminal_characters
    assert (
        CleanConfig.model_validate(CleanConfig(c4=c4, fineweb={"compat": "datatrove"}).model_dump(mode="json")).c4 == c4
    )
    with pytest.raises((ConfigError, ValueError), match="datatrove"):
        C4Config(compat="nemo")


def test_a_family_is_asked_for_by_itself():
    """Rules compare other columns with compat, under the same names; the other families do not."""
    for make, kind in ((quality_rules, GopherQualityConfig), (repetition_rules, GopherRepetitionConfig)):
        plain_rules, rules = make(kind()), make(kind(compat="datatrove"))
        assert [rule.reason for rule in plain_rules] == [rule.reason for rule in rules]
        assert [rule.column for rule in plain_rules] != [rule.column for rule in rules]
    assert not counts_as_datatrove(RulesConfig(c4=C4Config(), gopher_quality=GopherQualityConfig()))
    assert counts_as_datatrove(RulesConfig(c4=C4Config(), fineweb=FineWebConfig(compat="datatrove")))
    (row,) = measured(["a b. a b."], config=RulesConfig(fineweb=FineWebConfig(compat="datatrove")))
    assert (row["tokens"], row["terminal_lines"], row["sentences"], row["split_lines"]) == (6, 1, 0, 0)


def test_blanks_beside_citations_stay_in_their_line():
    """Where one was cut, as datatrove has it; those at the ends of the text go."""
    config = C4Config(compat="datatrove", terminal_punctuation=False, min_words_per_line=1)
    texts = Texts.of(["[3] So he said. [4]\n[5] And she. [6]\nAnd they. [7]", "[1]\n[2] x", "So he said. [3]"])
    edited = edit_lines(texts, config, no_statistics(3))
    assert list(edited) == ["So he said. \n And she. \nAnd they.", "x", "So he said."]
    strict = C4Config(compat="datatrove", min_words_per_line=1)
    assert list(edit_lines(texts, strict, no_statistics(3))) == ["", "", ""]
    assert list(edit_lines(texts, C4Config(min_words_per_line=1), no_statistics(3)))[2] == "So he said."


def test_without_spacy_nothing_begins(tmp_path, monkeypatch):
    """A message with what to do, before a document is read, and no folder."""
    monkeypatch.setitem(__import__("sys").modules, "spacy", None)
    with pytest.raises(UnavailableError, match=r"compat: datatrove .*pip install 'megalite\[spacy\]'"):
        English()
    corpus = corpus_of(write_json_lines(tmp_path / "a.jsonl", prose(3)))
    with pytest.raises(UnavailableError, match="compat: datatrove"):
        clean(corpus, tmp_path / "out", CleanConfig(gopher_quality={"compat": "datatrove"}))
    assert not list(tmp_path.glob("out*"))


def test_hashes_of_runs_are_those_of_strings():
    """A run's hash is made of its words' hashes: "ab c" and "a bc" are one run, another order is none."""
    rows = measured(["v w x y pq r v w x y p qr", "v w x y pq r v w x y r pq"])
    assert rows[0]["duplicate_6gram_chars"] == 7
    assert rows[1]["duplicate_6gram_chars"] == 0
    assert [row["tokens"] for row in rows] == [12, 12]
