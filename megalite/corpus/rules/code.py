"""Rules for source code (The Stack, Kocetkov et al. 2022; StarCoder, Li et al. 2023; StarCoder2, Lozhkov et al. 2024).

They mean what the papers say, with these differences:

1.  The papers choose thresholds by programming language. Here one recipe has one set; give languages with long lines
    (HTML, JSON, Markdown, TeX) a recipe of their own, with `max_line_chars: 100000`.
2.  Hexadecimal bytes may have blanks behind their commas, as most programs write them (`encoded.py`).
3.  Visible text of HTML is what stands outside of tags, comments, scripts and styles; entities count as written.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from megalite.corpus.rules.characters import character_classes
from megalite.corpus.rules.code_scan import measure_documents
from megalite.corpus.rules.columns import (
    CODE_LINES,
    CODE_POINTS,
    ENCODED_CHARS,
    GENERATED_MARKS,
    HTML_CHARS,
    IS_HTML,
    LETTERS,
    LINE_CHARS,
    LONGEST_ENCODED_CHARS,
    LONGEST_LINE_CHARS,
    VISIBLE_CHARS,
    XML_DECLARATIONS,
)
from megalite.corpus.rules.phrases import Phrases, make_phrases
from megalite.corpus.rules.rule import Rule, rules_that_are_on
from megalite.corpus.rules.settings import CodeConfig
from megalite.kernel import read_only
from megalite.texts import Texts


def code_rules(config: CodeConfig) -> list[Rule]:
    """The rules for source code that are on."""
    rules = rules_that_are_on(
        ("code: long line", LONGEST_LINE_CHARS, None, "<=", config.max_line_chars),
        ("code: long lines", LINE_CHARS, CODE_LINES, "<=", config.max_mean_line_chars),
        ("code: many lines", CODE_LINES, None, "<=", config.max_lines),
        ("code: few letters", LETTERS, CODE_POINTS, ">=", config.min_letter_share),
        ("code: much encoded data", ENCODED_CHARS, CODE_POINTS, "<=", config.max_encoded_share),
        ("code: long run of encoded data", LONGEST_ENCODED_CHARS, None, "<=", config.max_encoded_chars),
        ("code: generated", GENERATED_MARKS, None, "<=", 0 if config.generated_marks else None),
        ("code: xml", XML_DECLARATIONS, None, "<=", 0 if config.reject_xml else None),
    )
    html = [
        ("code: html with little text", HTML_CHARS, config.min_visible_share),
        ("code: html with few characters of text", IS_HTML, config.min_visible_chars),
    ]
    rules += [
        Rule(reason, VISIBLE_CHARS, threshold, ">=", per, min_units=1)
        for reason, per, threshold in html
        if threshold is not None
    ]
    return rules


def measure_code(texts: Texts, statistics: np.ndarray, config: CodeConfig) -> None:
    """Fill the columns of these rules.

    Args:
        texts: what to measure.
        statistics: int64 [documents, columns].
        config: says what marks a generated file, and where.
    """
    buffer, offsets = read_only(texts.buffer), read_only(texts.offsets)
    marks = _marks(config.generated_marks)
    measure_documents(buffer, offsets, character_classes(), marks, config.generated_lines, statistics)


@lru_cache(maxsize=4)
def _marks(phrases: tuple[str, ...]) -> Phrases:
    return make_phrases([phrases])
