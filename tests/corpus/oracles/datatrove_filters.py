"""The program that asks datatrove: every rule of its filters alone, on every document.

Its filters take their words and sentences from a tokenizer of the language. Asked for `plain` words that is one of
ours, so that the rules are compared and not the tokenizers: a word is a chunk between blanks without the punctuation at
its ends, or the chunk where nothing else is left, and C4's sentences are counted by their marks, as `rules/c4.py` says.
Asked for `spacy` words it is its own, and our rules with `compat: datatrove` are asked too, since they need spaCy.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from tests.corpus.rules.reference import strip_punctuation

TOOLS = Path(__file__).parents[3] / "tools" / "benchmarks"

ERROR = "error"
"""In the place of a decision: the filter raised."""

QUALITY = {
    "gopher: too few words": {"min_doc_words": 50},
    "gopher: too many words": {"max_doc_words": 100_000},
    "gopher: short words": {"min_avg_word_length": 3},
    "gopher: long words": {"max_avg_word_length": 10},
    "gopher: many bullet lines": {"max_bullet_lines_ratio": 0.9},
    "gopher: many lines end in an ellipsis": {"max_ellipsis_lines_ratio": 0.3},
    "gopher: few words with letters": {"max_non_alpha_words_ratio": 0.8},
    "gopher: few stop words": {"min_stop_words": 2},
}
QUALITY_OFF = {
    "min_doc_words": None,
    "max_doc_words": None,
    "min_avg_word_length": None,
    "max_avg_word_length": None,
    "max_symbol_word_ratio": None,
    "max_bullet_lines_ratio": None,
    "max_ellipsis_lines_ratio": None,
    "max_non_alpha_words_ratio": None,
    "min_stop_words": None,
}
SYMBOLS = {"gopher: many hash signs": r"\.\.\.|…", "gopher: many ellipses": "#"}
"""One threshold for two rules: each is asked about texts in which a letter stands for the other's symbol. With spaCy's
words that would be other words, so there they are compared as one rule."""

EITHER_SYMBOL = "gopher: many hash signs or ellipses"

REPETITION = {
    "gopher: duplicate paragraphs": {"dup_para_frac": 0.3},
    "gopher: characters in duplicate paragraphs": {"dup_para_char_frac": 0.2},
    "gopher: duplicate lines": {"dup_line_frac": 0.3},
    "gopher: characters in duplicate lines": {"dup_line_char_frac": 0.2},
    **{f"gopher: top {n}-gram": {"top_n_grams": ((n, share),)} for n, share in ((2, 0.2), (3, 0.18), (4, 0.16))},
    **{
        f"gopher: duplicate {n}-grams": {"dup_n_grams": ((n, share),)}
        for n, share in ((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.10))
    },
}
REPETITION_OFF = {
    "dup_line_frac": None,
    "dup_para_frac": None,
    "dup_line_char_frac": None,
    "dup_para_char_frac": None,
    "top_n_grams": (),
    "dup_n_grams": (),
}

FINEWEB = {
    "fineweb: few lines end a sentence": {"line_punct_thr": 0.12},
    "fineweb: many short lines": {"short_line_thr": 0.67},
    "fineweb: characters in duplicate lines": {"char_duplicates_ratio": 0.01},
    "fineweb: many line ends": {"new_line_ratio": 0.3},
}
FINEWEB_OFF = {
    "line_punct_thr": 0.0,
    "short_line_thr": 1.0,
    "char_duplicates_ratio": 1.0,
    "new_line_ratio": math.inf,
    "stop_chars": tuple(".?!\"'"),  # as the data set's paper; the code's default has other scripts and no quotes
}

C4_LINES = {"min_words_per_line": 5, "max_word_length": 1000}
C4 = {
    "c4: lorem ipsum": {"filter_lorem_ipsum": True},
    "c4: curly bracket": {"filter_curly_bracket": True},
    "c4: too few sentences": {"min_num_sentences": 3},
}
C4_OFF = {**C4_LINES, "filter_lorem_ipsum": False, "filter_curly_bracket": False, "min_num_sentences": -1}

SENTENCE_ENDS = re.compile(r"[.!?](?=[\"')\]}»’”]*(?:[ \t]|$))|[。！？]")


def plain_tokenizer() -> Any:
    """One of ours, behind datatrove's interface."""
    from datatrove.utils.word_tokenizers import WordTokenizer

    class PlainTokenizer(WordTokenizer):
        @cache  # noqa: B019  # there is one, and it lives as long as the program
        def word_tokenize(self, text: str) -> list[str]:
            return [strip_punctuation(chunk) or chunk for chunk in text.split()]

        def span_tokenize(self, text: str) -> list[tuple[int, int]]:
            return [match.span() for match in SENTENCE_ENDS.finditer(text)]

        def sent_tokenize(self, text: str) -> list[str]:
            return [part for part in SENTENCE_ENDS.split(text) if part.strip()]

    return PlainTokenizer()


def make_filters(words: dict[str, Any], symbols: Iterable[str]) -> dict[str, Any]:
    """A filter for each rule of ours, which has no other rule.

    Args:
        words: whose words: an argument of the filters, or none for datatrove's own.
        symbols: names of the rules on symbols.
    """
    from datatrove.pipeline.filters.c4_filters import C4QualityFilter
    from datatrove.pipeline.filters.fineweb_quality_filter import FineWebQualityFilter
    from datatrove.pipeline.filters.gopher_quality_filter import GopherQualityFilter
    from datatrove.pipeline.filters.gopher_repetition_filter import GopherRepetitionFilter

    tables = (
        (GopherQualityFilter, QUALITY_OFF, QUALITY),
        (GopherQualityFilter, QUALITY_OFF, {rule: {"max_symbol_word_ratio": 0.1} for rule in symbols}),
        (GopherRepetitionFilter, REPETITION_OFF, REPETITION),
        (FineWebQualityFilter, FINEWEB_OFF, FINEWEB),
        (C4QualityFilter, C4_OFF, C4),
    )
    return {rule: kind(**{**off, **on, **words}) for kind, off, rules in tables for rule, on in rules.items()}


def decide(rule: str, filter: Callable[[Any], Any], text: str) -> bool | str:
    """Whether the rule rejects a text, or ERROR."""
    from datatrove.data import Document

    if rule in SYMBOLS:
        text = re.sub(SYMBOLS[rule], "x", text)
    try:
        return filter(Document(text=text, id="")) is not True
    except ZeroDivisionError:
        return ERROR


def edit(text: str, words: dict[str, Any]) -> str:
    """What datatrove's C4 filter leaves of the lines of a text."""
    from datatrove.data import Document
    from datatrove.pipeline.filters.c4_filters import C4QualityFilter

    document = Document(text=text, id="")
    assert C4QualityFilter(**C4_OFF, **words).filter(document) is True
    return document.text


def answer(texts: list[str], kind: str) -> dict[str, Any]:
    """What datatrove decides and leaves; text by text, since it remembers the words of a few texts only."""
    words = {"language": plain_tokenizer()} if kind == "plain" else {}
    filters = make_filters(words, SYMBOLS if kind == "plain" else [EITHER_SYMBOL])
    decisions: dict[str, list] = {rule: [] for rule in filters}
    edited = []
    for text in texts:
        for rule, each in filters.items():
            decisions[rule].append(decide(rule, each.filter, text))
        edited.append(edit(text, words))
    return {"decisions": decisions, "edited": edited}


def main() -> None:
    from datatrove.utils.text import PUNCTUATION, PUNCTUATION_SET, TERMINAL_PUNCTUATION

    question = json.load(sys.stdin)
    sets = "".join(sorted(PUNCTUATION_SET)), "".join(sorted(TERMINAL_PUNCTUATION))
    found = {"punctuation": PUNCTUATION, "sets": sets, **answer(question["texts"], question["words"])}
    if question["words"] == "spacy":
        found |= with_spacy(question["texts"], question["real"])
    print(json.dumps(found))


def with_spacy(texts: list[str], real: list[str]) -> dict[str, Any]:
    """What only a process that has spaCy can tell of our side.

    Args:
        texts: to judge by each rule.
        real: to judge by each family, with the thresholds of datatrove.
    """
    from megalite.corpus.rules.punctuation import PUNCTUATION_MARKS, TERMINAL_MARKS
    from tests.corpus.oracles.our_rules import COMPAT, our_decisions
    from tests.corpus.oracles.spacy_words import seconds_of_cuts, wrong_cuts

    sys.path.insert(0, str(TOOLS))
    from rules_agreement import compare

    ours = our_decisions(texts, COMPAT)
    pair = [ours.pop(rule) for rule in SYMBOLS]
    ours[EITHER_SYMBOL] = [one or other for one, other in zip(*pair, strict=True)]
    marks = "".join(sorted(PUNCTUATION_MARKS)), "".join(sorted(TERMINAL_MARKS))
    cuts = {"cuts": wrong_cuts(texts), "seconds": seconds_of_cuts()}
    return {"ours": ours, **cuts, "families": compare(real), "marks": marks}


if __name__ == "__main__":
    main()
