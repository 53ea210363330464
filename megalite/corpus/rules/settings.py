"""Thresholds of the quality rules: what `clean.rules` of a recipe may say. null turns a rule, or a whole set, off.

The sets come from these papers, and the defaults are theirs:

    Gopher    Rae et al. 2021, "Scaling Language Models: Methods, Analysis & Insights from Training Gopher", app. A.1
    C4        Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer",
              sec. 2.2, and the code of the data set where it differs from the text
    FineWeb   Penedo et al. 2024, "The FineWeb Datasets: Decanting the Web for the Finest Text Data at Scale", sec. 3.6

Each of these sets has `compat: datatrove`, which counts as the filters of datatrove 0.10 count, whose judgement of
words, lines and sentences is another one than the papers' and ours; with it, what these filters keep is kept (see
`gopher.py`, `c4.py`, `fineweb.py`, and docs/benchmarks/rules.md for how often the two differ without it).

They were tuned on English web pages. Program text, poems, tables and most other languages fail them in large numbers:
look at a sample's histogram of a statistic before a rule is set loose on a corpus.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from megalite.addition import Addition
from megalite.config.brought import wrong_options
from megalite.corpus.rules.punctuation import TERMINAL_MARKS
from megalite.plugins import Table
from megalite.section import FrozenOptions, Options, Problem, Section

Share = Annotated[float, Field(ge=0.0, le=1.0)]

Compat = Literal["datatrove"]

DATATROVE = "datatrove"


def _with_defaults(given: Any, defaults: dict[str, Any]) -> Any:
    """What was given for a set of rules, with datatrove's defaults where it is to count as datatrove does."""
    return {**defaults, **given} if isinstance(given, dict) and given.get("compat") == DATATROVE else given


class GopherQualityConfig(Section):
    """Gopher's quality rules (Rae et al. 2021, A.1.1): does it read like prose?

    A chunk stands between blanks; a word is a chunk without the punctuation at its ends.
    """

    compat: Compat | None = None
    """`datatrove` counts words as its filter does: spaCy's, punctuation marks among them, also for the share of words
    with letters, which few programs and tables then pass. Needs spaCy (`pip install 'megalite[spacy]'`)."""
    min_words: NonNegativeInt | None = 50
    """Fewest words."""
    max_words: PositiveInt | None = 100_000
    """Most words."""
    min_mean_word_length: NonNegativeFloat | None = 3.0
    """Least mean length of a word, in characters."""
    max_mean_word_length: NonNegativeFloat | None = 10.0
    """Largest mean length of a word, in characters."""
    max_hash_signs_per_chunk: NonNegativeFloat | None = 0.1
    """Most hash signs (#), as a ratio to the chunks."""
    max_ellipses_per_chunk: NonNegativeFloat | None = 0.1
    """Most ellipses, "..." or U+2026, as a ratio to the chunks."""
    max_bullet_line_share: Share | None = 0.9
    """Largest share of lines that begin with a bullet."""
    max_ellipsis_line_share: Share | None = 0.3
    """Largest share of lines that end with an ellipsis: teasers cut short."""
    min_letter_chunk_share: Share | None = 0.8
    """Least share of chunks with at least one letter."""
    min_stop_words: NonNegativeInt | None = 2
    """Fewest different stop words. Prose has many, lists of keywords have none."""
    stop_words: tuple[str, ...] = Field(default=("the", "be", "to", "of", "and", "that", "have", "with"), max_length=63)
    """Words to look for, in just this case of letters. Give those of the corpus's language; at most 63."""


class GopherRepetitionConfig(Section):
    """Gopher's repetition rules (Rae et al. 2021, table A1): does it say the same thing again and again?

    Shares of characters are of all characters of the document.
    """

    compat: Compat | None = None
    """`datatrove` takes spaCy's words, punctuation marks among them, for the n-grams, and parts lines and paragraphs as
    its filter does. Needs spaCy (`pip install 'megalite[spacy]'`)."""
    max_duplicate_line_share: Share | None = 0.3
    """Largest share of lines that repeat an earlier line."""
    max_duplicate_paragraph_share: Share | None = 0.3
    """Largest share of paragraphs that repeat an earlier paragraph."""
    max_duplicate_line_char_share: Share | None = 0.2
    """Largest share of characters in repeated lines."""
    max_duplicate_paragraph_char_share: Share | None = 0.2
    """Largest share of characters in repeated paragraphs."""
    max_top_2gram_char_share: Share | None = 0.20
    """Largest share of characters in the most frequent pair of words, all occurrences together."""
    max_top_3gram_char_share: Share | None = 0.18
    """The same of 3 words."""
    max_top_4gram_char_share: Share | None = 0.16
    """The same of 4 words."""
    max_duplicate_5gram_char_share: Share | None = 0.15
    """Largest share of characters in runs of 5 words that repeat an earlier run; no character counts twice."""
    max_duplicate_6gram_char_share: Share | None = 0.14
    """The same of 6 words."""
    max_duplicate_7gram_char_share: Share | None = 0.13
    """The same of 7 words."""
    max_duplicate_8gram_char_share: Share | None = 0.12
    """The same of 8 words."""
    max_duplicate_9gram_char_share: Share | None = 0.11
    """The same of 9 words."""
    max_duplicate_10gram_char_share: Share | None = 0.10
    """The same of 10 words."""


class C4Config(Section):
    """C4's rules (Raffel et al. 2020, 2.2): drop lines that are no sentences, then documents with too little left.

    It edits: blanks at both ends of each line go, dropped lines go, the rest is joined again.
    """

    compat: Compat | None = None
    """`datatrove` counts sentences as its filter does, by spaCy's words, leaves the blank before a citation where one
    was cut, and takes its defaults: lines of 3 words, 5 sentences. Needs spaCy (`pip install 'megalite[spacy]'`)."""
    terminal_punctuation: bool = True
    """Drop lines that do not end in one of `terminal_characters`, or that end in "...". It is by far the harshest rule
    (it removes about 30 % of a web corpus); FineWeb leaves it out."""
    terminal_characters: str = Field(default=".?!\"'", min_length=1)
    """What a line may end with. Add those of other scripts, as in ".?!\\"'。？！"."""
    min_words_per_line: PositiveInt | None = 5
    """Drop lines of fewer words (chunks between blanks)."""
    max_word_length: PositiveInt | None = 1000
    """Drop lines with a longer word, in characters."""
    remove_citations: bool = True
    """Cut out "[12]", "[]", "[edit]" and "[citation needed]" as in Wikipedia."""
    drop_javascript_lines: bool = True
    """Drop lines that say "javascript", in any case of letters: warnings of web pages."""
    policy_phrases: tuple[Annotated[str, Field(min_length=1)], ...] = (
        "terms of use",
        "privacy policy",
        "cookie policy",
        "uses cookies",
        "use of cookies",
        "use cookies",
    )
    """Drop lines with one of these phrases, in any case of letters; [] for none."""
    reject_lorem_ipsum: bool = True
    """Reject documents with "lorem ipsum", in any case of letters, in a line that is not dropped."""
    reject_curly_bracket: bool = True
    """Reject documents with "{" in a line that is not dropped: they are programs."""
    min_sentences: PositiveInt | None = 3
    """Reject documents with fewer sentences left."""

    @model_validator(mode="before")
    @classmethod
    def _take_defaults(cls, given: Any) -> Any:
        return _with_defaults(given, {"min_words_per_line": 3, "min_sentences": 5})


class FineWebConfig(Section):
    """FineWeb's own rules (Penedo et al. 2024, 3.6), on top of Gopher's and C4's: is it a list?"""

    compat: Compat | None = None
    """`datatrove` compares line ends with spaCy's words, punctuation marks among them, and takes its default of
    `terminal_characters`: the full stops of all scripts, no quotes. Needs spaCy (`pip install 'megalite[spacy]'`)."""
    min_terminal_line_share: Share | None = 0.12
    """Least share of lines that end in one of `terminal_characters`. Blank lines do not count, here and below."""
    terminal_characters: str = Field(default=".?!\"'", min_length=1)
    """What ends a sentence. Add those of other scripts, as in ".?!\\"'。？！"."""
    max_short_line_share: Share | None = 0.67
    """Largest share of short lines."""
    short_line_chars: NonNegativeInt = 30
    """A line of at most this many characters is short."""
    max_duplicate_line_char_share: Share | None = 0.01
    """Largest share of characters in repeated lines, line ends not counted. The default is that of datatrove's code."""
    max_newlines_per_chunk: NonNegativeFloat | None = 0.3
    """Most line ends, as a ratio to the chunks between blanks."""

    @model_validator(mode="before")
    @classmethod
    def _take_defaults(cls, given: Any) -> Any:
        return _with_defaults(given, {"terminal_characters": "".join(sorted(TERMINAL_MARKS))})


class BadWordsConfig(Section):
    """Documents with words from a list (as C4 does; Raffel et al. 2020, 2.2).

    Lists remove innocent text too, and more of it where minorities write about themselves (Dodge et al. 2021).
    """

    file: Path
    """Words and phrases, one a line, UTF-8; empty lines do not count."""
    max_share: Share = 0.0
    """Largest share of occurrences among the chunks between blanks; 0 rejects on the first."""
    whole_words: bool = True
    """Letters, digits and underscores must not touch an occurrence. Turn off for scripts without blanks."""


class CodeConfig(Section):
    """Rules for source code, as The Stack (Kocetkov et al. 2022), StarCoder (Li et al. 2023, 3.2) and StarCoder2
    (Lozhkov et al. 2024, 2.5) publish them. Sizes are `min_chars` and `max_chars` of the section around it.
    """

    max_line_chars: PositiveInt | None = 1000
    """Longest line, in characters: above it are data and minified programs."""
    max_mean_line_chars: PositiveFloat | None = 100.0
    """Largest mean length of a line, in characters."""
    max_lines: PositiveInt | None = 100_000
    """Most lines."""
    min_letter_share: Share | None = 0.25
    """Least share of letters among the characters."""
    max_encoded_share: Share | None = 0.5
    """Largest share of characters in encoded data: 64 characters of base64 on end, 8 hexadecimal bytes, 8 escapes of
    \\u."""
    max_encoded_chars: PositiveInt | None = 1024
    """Longest run of encoded data, in characters."""
    generated_marks: tuple[Annotated[str, Field(min_length=1)], ...] = (
        "auto-generated",
        "autogenerated",
        "automatically generated",
        "generated automatically",
        "this file is generated",
        "generated by",
    )
    """Reject documents with one of these in their first lines, in any case of letters; [] for none."""
    generated_lines: PositiveInt = 5
    """How many lines from the beginning are searched for them."""
    reject_xml: bool = True
    """Reject documents with an XML declaration (`<?xml version=`) in the first 100 characters: drawings, settings."""
    min_visible_share: Share | None = 0.2
    """Of a page of HTML: least share of characters that a reader sees."""
    min_visible_chars: PositiveInt | None = 100
    """Of a page of HTML: fewest characters that a reader sees."""

    def problems(self) -> Iterator[Problem]:
        lines = type(self).model_fields["generated_lines"].default
        if not self.generated_marks and self.generated_lines != lines:
            yield (
                ("generated_lines",),
                f"found {self.generated_lines}, and generated_marks names nothing to look for in them; leave it out",
            )


class CustomRuleConfig(Section):
    """Which numbers that a plug-in's rule gives to documents stay."""

    min: float | None = None
    """Least; null for none."""
    max: float | None = None
    """Largest; null for none."""
    options: Options = Field(default_factory=FrozenOptions)
    """What the rule may be told."""


FILTER_RULES: Table[Addition] = Table("filter rule", {})
"""`(text)` to a number."""


class RulesConfig(Section):
    """Which documents to keep. null turns a rule, or a set of rules, off."""

    min_chars: PositiveInt | None = 50
    """Shortest document, in characters (Unicode code points) after the repair."""
    max_chars: PositiveInt | None = 10_000_000
    """Longest document, in characters after the repair."""
    min_alphanumeric_share: Share | None = 0.25
    """Least share of letters and digits among the characters: below it are tables, encoded data and line noise."""
    max_digit_share: Share | None = None
    """Largest share of digits among the characters: above it are tables and logs."""
    max_repeated_line_share: Share | None = 0.3
    """Largest share of lines that repeat an earlier line of the document, blanks at both ends not counted (Gopher, Rae
    et al. 2021); documents of fewer than 5 lines pass. Program text needs about 0.6."""
    c4: C4Config | None = None
    """C4's rules. They edit, and come first: all others judge what they leave."""
    gopher_quality: GopherQualityConfig | None = None
    """Gopher's quality rules."""
    gopher_repetition: GopherRepetitionConfig | None = None
    """Gopher's repetition rules; they take about as long as all others together."""
    fineweb: FineWebConfig | None = None
    """FineWeb's own rules."""
    bad_words: BadWordsConfig | None = None
    """A list of words that documents must not hold."""
    code: CodeConfig | None = None
    """Rules for source code."""
    custom: dict[str, CustomRuleConfig] = Field(default_factory=dict)
    """Rules that plug-ins bring, by name: asked last."""

    def problems(self) -> Iterator[Problem]:
        for name, rule in self.custom.items():
            if name not in FILTER_RULES:
                yield ("custom", name), FILTER_RULES.unknown(name)
                continue
            if rule.min is None and rule.max is None:
                yield ("custom", name), "neither min nor max; give one, or both"
            elif rule.min is not None and rule.max is not None and rule.min > rule.max:
                yield (
                    ("custom", name, "min"),
                    f"found {rule.min:g} above max={rule.max:g}, which no document passes; exchange them",
                )
            yield from wrong_options(
                FILTER_RULES[name], rule.options, f"filter rule {name}", ("custom", name, "options")
            )


def counts_as_datatrove(config: RulesConfig) -> bool:
    """Whether some rules of a config say so."""
    families = (config.c4, config.gopher_quality, config.gopher_repetition, config.fineweb)
    return any(family is not None and family.compat == DATATROVE for family in families)
