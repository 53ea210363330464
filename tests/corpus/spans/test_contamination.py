"""Documents that quote an evaluation set: the matches that a search over Python's words finds."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.corpus.spans import contamination
from megalite.corpus.spans.contamination import find_overlaps, index_examples, index_files, read_examples
from megalite.corpus.spans.settings import DecontaminateConfig
from megalite.errors import DataError
from megalite.texts import Texts
from tests.corpus.spans.kit import as_tuples, spans_of_cover
from tests.kit.data import prose, write_json_lines

QUESTION = "Which of the four Galilean moons of Jupiter did Simon Marius claim to have seen first?"

PLAIN = ("one", "two", "Two,", "three", "3", "-", "é", "日本", "four five", "\n")
ODD = ("\xa0", "\u3000", "\u2014", "one\u2019s", "«two»", "\U0001f600", "\U0001d400", "a\u0301", "\x00", "x\xadx")
tokens = st.sampled_from((*PLAIN, *ODD))
text = st.lists(tokens, max_size=25).map(" ".join)


def ngrams_by_hand(text: str, ngram: int) -> list[tuple[tuple[bytes, ...], int, int]]:
    """Runs of words with their first byte and the byte behind the last."""
    words = [(word, *place) for word, place in words_by_hand(text)]
    runs = [words[first : first + ngram] for first in range(len(words) - ngram + 1)]
    return [(tuple(word for word, _, _ in run), run[0][1], run[-1][2]) for run in runs]


def words_by_hand(text: str) -> Iterator[tuple[bytes, tuple[int, int]]]:
    """Words with their first byte and the byte behind them, character by character."""
    begin = place = 0
    for character in [*text, " "]:
        behind = place + len(character.encode())
        is_between = character.isspace() or unicodedata.category(character)[0] in "PS"
        if is_between or (character.isascii() and not character.isalnum()):
            if begin < place:
                yield text.encode()[begin:place].lower(), (begin, place)
            begin = behind
        place = behind


QUOTES = ("\u201cJupiter\u201d", "\xabJupiter\xbb", "\u2018Jupiter\u2019")


@pytest.mark.parametrize(
    ("plain", "other"),
    [(" ", "\xa0"), (" ", "\u3000"), (" ", " \u2014 "), *(("Jupiter", quoted) for quoted in QUOTES)],
)
def test_copies_in_other_typography(plain: str, other: str):
    """Other blanks, dashes and quotes are between words, too."""
    index = index_examples([("q", QUESTION)], 13)
    copy = Texts.of([QUESTION.replace(plain, other)])
    assert find_overlaps(copy, index).share.tolist() == [1.0]


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_composed_and_decomposed_letters(form):
    """Whichever of them an evaluation set has: `clean` composes the corpus, so decomposed examples were never found."""
    question = "Où se trouve la célèbre bibliothèque étudiée près de l'église ?"
    index = index_examples([("short", "é"), ("q", unicodedata.normalize(form, question))], 8)
    assert index.num_too_short == 1
    found = find_overlaps(Texts.of([unicodedata.normalize(form, question) for form in ("NFC", "NFD")]), index)
    assert found.share.tolist() == [1.0, 1.0]
    assert found.first_example.tolist() == [1, 1]


@settings(max_examples=300, deadline=None)
@given(texts=st.lists(text, max_size=6), examples=st.lists(text, max_size=4), ngram=st.integers(2, 4))
def test_equals_search_by_hand(texts, examples, ngram):
    """Counts, first example and matching bytes of each document, whatever the case and punctuation."""
    wanted: dict[tuple[bytes, ...], int] = {}
    for number, example in enumerate(examples):
        for run, _, _ in ngrams_by_hand(example, ngram):
            wanted.setdefault(run, number)
    index = index_examples([(str(number), example) for number, example in enumerate(examples)], ngram)
    overlaps = find_overlaps(Texts.of(texts), index)
    assert index.num_too_short == sum(not ngrams_by_hand(example, ngram) for example in examples)
    covers = []
    for number, document in enumerate(texts):
        runs = ngrams_by_hand(document, ngram)
        matches = [run for run in runs if run[0] in wanted]
        cover = np.zeros(len(document.encode()), bool)
        for _, start, end in matches:
            cover[start:end] = True
        covers.append(cover)
        assert (overlaps.num_ngrams[number], overlaps.num_matching[number]) == (len(runs), len(matches))
        assert overlaps.share[number] == pytest.approx(len(matches) / max(1, len(runs)))
        assert overlaps.first_example[number] == (wanted[matches[0][0]] if matches else -1)
    assert as_tuples(overlaps.spans) == spans_of_cover(covers)


def test_slices_do_not_change_the_result(monkeypatch):
    """Texts matched a few at a time give the same as all at once."""
    texts = Texts.of(["", *prose(40), "", *prose(10, seed=3)])
    index = index_examples([("a", prose(40)[7]), ("b", prose(10, seed=3)[2])], 5)
    whole = find_overlaps(texts, index)
    monkeypatch.setattr(contamination, "SLICE_BYTES", 300)
    for one, other in zip(whole, find_overlaps(texts, index), strict=True):
        assert np.array_equal(one, other)
    assert set(whole.first_example) >= {-1, 0, 1}


def test_files_of_every_kind(tmp_path):
    """JSON lines, Parquet and plain text; examples are named by file and line or id."""
    words = [
        "alpha",
        "beta",
        "gamma",
        "delta",
        "epsilon",
        "zeta",
        "eta",
        "theta",
        "iota",
        "kappa",
        "lambda",
        "mu",
        "nu",
        "xi",
    ]
    write_json_lines(tmp_path / "a.jsonl", [QUESTION, "too short"])
    pq.write_table(pa.table({"text": [" ".join(words)], "id": ["greek"]}), tmp_path / "b.parquet")
    (tmp_path / "c.txt").write_text(" ".join(reversed(words)), encoding="utf-8")
    paths = tuple(tmp_path / name for name in ("a.jsonl", "b.parquet", "c.txt"))
    index = index_files(DecontaminateConfig(paths=paths))
    assert index.ids == ("a.jsonl:1", "a.jsonl:2", "b.parquet:greek", "c.txt")
    assert index.num_too_short == 1
    documents = [f"He asked: {QUESTION.upper()} Nobody knew.", "clean", " - ".join(words), " ".join(reversed(words))]
    overlaps = find_overlaps(Texts.of(documents), index)
    assert [index.ids[example] if example >= 0 else None for example in overlaps.first_example] == [
        "a.jsonl:1",
        None,
        "b.parquet:greek",
        "c.txt",
    ]


def test_min_overlap():
    """At 0 one match is enough; above, the share of a document's runs of words decides."""
    index = index_examples([("q", QUESTION)], 13)
    documents = [QUESTION, QUESTION + " " + " ".join(map(str, range(100))), "nothing of it", ""]
    overlaps = find_overlaps(Texts.of(documents), index)
    for min_overlap, expected in ((0.0, [True, True, False, False]), (0.5, [True, False, False, False])):
        config = DecontaminateConfig(paths=(Path("unused"),), min_overlap=min_overlap)
        assert overlaps.contaminated(config).tolist() == expected


def test_errors_say_what_to_do(tmp_path):
    """A missing file, a wrong field and examples that are all too short stop with advice."""
    with pytest.raises(DataError, match=r"gone\.jsonl: no such file; decontaminate\.paths"):
        index_files(DecontaminateConfig(paths=(tmp_path / "gone.jsonl",)))
    path = write_json_lines(tmp_path / "set.jsonl", ["just three words"])
    with pytest.raises(DataError, match="field 'question': set text_field"):
        list(read_examples(path, "question"))
    good = write_json_lines(tmp_path / "good.jsonl", [QUESTION])
    (tmp_path / "empty.jsonl").write_text("")
    for paths in ((path,), (path, good), (good, path)):
        with pytest.raises(DataError, match=r"set\.jsonl: none of its 1 examples has 13 words or more"):
            index_files(DecontaminateConfig(paths=paths))
    with pytest.raises(DataError, match=r"empty\.jsonl: empty: no example is in it"):
        index_files(DecontaminateConfig(paths=(tmp_path / "empty.jsonl", good)))


def test_own_reader():
    """Examples may come from a function of the caller's."""
    config = DecontaminateConfig(paths=(Path("moons"),))
    index = index_files(config, read=lambda path, field: [(f"{path}/{field}", QUESTION)])
    assert index.ids == ("moons/text",)
