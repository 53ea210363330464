"""The rules that are always at hand: length, letters and digits, repeated lines. They fit text of every kind."""

from __future__ import annotations

from megalite.corpus.rules.columns import ALPHANUMERICS, CHUNKS, CODE_POINTS, DIGITS, FILLED_LINES, REPEATED_LINES
from megalite.corpus.rules.rule import Rule, rules_that_are_on
from megalite.corpus.rules.settings import RulesConfig

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
