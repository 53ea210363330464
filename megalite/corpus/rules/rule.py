"""A rule is a reason, a statistic and a threshold; whole columns of documents are judged at once.

    Rule("gopher: mean word length too short", WORD_CHARS, per=WORDS, keep=">=", threshold=3.0)

`keep` says how the value of a document that stays compares with the threshold. The reason is stable: it is written
beside each rejected document and counted in manifests.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import numpy as np

from megalite.corpus.rules.columns import ALPHANUMERICS, CHUNKS, CODE_POINTS, DIGITS, FILLED_LINES, REPEATED_LINES
from megalite.corpus.rules.settings import RulesConfig

COMPARE = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}


@dataclass(frozen=True)
class Rule:
    """One threshold on a column of the statistics, or on the ratio of two."""

    reason: str
    column: int
    threshold: float
    keep: str
    per: int | None = None
    """Column to divide by; where it is 0 the value is 0."""
    min_units: int = 0
    """Documents with less than this in `per` pass: a share of so few says nothing."""

    def values(self, statistics: np.ndarray) -> np.ndarray:
        """The statistic of each document, float64 [documents].

        Args:
            statistics: int64 [documents, columns].
        """
        amounts = statistics[:, self.column].astype(np.float64)
        if self.per is None:
            return amounts
        units = statistics[:, self.per]
        return np.divide(amounts, units, out=np.zeros_like(amounts), where=units != 0)

    def rejects(self, statistics: np.ndarray) -> np.ndarray:
        """Which documents the rule throws out, bool [documents]."""
        rejected = ~COMPARE[self.keep](self.values(statistics), self.threshold)
        if self.per is not None and self.min_units:
            rejected &= statistics[:, self.per] >= self.min_units
        return rejected


def rules_that_are_on(*rows: tuple[str, int, int | None, str, float | None]) -> list[Rule]:
    """Rules from rows of (reason, column, column to divide by, keep, threshold); null thresholds are left out."""
    return [
        Rule(reason, column, float(threshold), keep, per)
        for reason, column, per, keep, threshold in rows
        if threshold is not None
    ]


MIN_LINES_FOR_REPETITION = 5
"""In fewer lines a repetition says nothing."""


def basic_rules(config: RulesConfig) -> list[Rule]:
    """The basic rules that are on. A document of blanks is rejected in any case."""
    rules = rules_that_are_on(
        ("empty", CHUNKS, None, ">", 0),
        ("too short", CODE_POINTS, None, ">=", config.min_chars),
        ("too long", CODE_POINTS, None, "<=", config.max_chars),
        ("few letters and digits", ALPHANUMERICS, CODE_POINTS, ">=", config.min_alphanumeric_share),
        ("many digits", DIGITS, CODE_POINTS, "<=", config.max_digit_share),
    )
    if config.max_repeated_line_share is not None:
        rules.append(
            Rule(
                "repeated lines",
                REPEATED_LINES,
                config.max_repeated_line_share,
                "<=",
                FILLED_LINES,
                min_units=MIN_LINES_FOR_REPETITION,
            )
        )
    return rules
