"""Rules and judgement against a plain reading of the rules: same texts, same first reason."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.corpus.rules.apply import KEEP, apply_rules, edit_and_measure, make_rules
from megalite.corpus.rules.settings import (
    BadWordsConfig,
    C4Config,
    FineWebConfig,
    GopherQualityConfig,
    GopherRepetitionConfig,
    RulesConfig,
)
from megalite.corpus.rules.statistics import no_statistics
from megalite.errors import DataError
from megalite.texts import Texts
from tests.corpus.rules import reference
from tests.corpus.rules.samples import TRAPS, library_texts, random_texts

OFF = {"min_chars": None, "max_chars": None, "min_alphanumeric_share": None, "max_repeated_line_share": None}

LOW = GopherQualityConfig(min_words=3, min_mean_word_length=1.0, min_letter_chunk_share=0.5, min_stop_words=1)

CONFIGS = {
    "default": RulesConfig(),
    "off": RulesConfig(**OFF),
    "quality": RulesConfig(**OFF, gopher_quality=GopherQualityConfig()),
    "repetition": RulesConfig(**OFF, gopher_repetition=GopherRepetitionConfig()),
    "fineweb": RulesConfig(**OFF, fineweb=FineWebConfig()),
    "all": RulesConfig(
        min_chars=10,
        max_digit_share=0.2,
        c4=C4Config(min_words_per_line=2, min_sentences=1),
        gopher_quality=LOW,
        gopher_repetition=GopherRepetitionConfig(max_top_2gram_char_share=0.5, max_top_3gram_char_share=None),
        fineweb=FineWebConfig(max_short_line_share=None),
    ),
}


def true_judgement(text: str, config: RulesConfig) -> tuple[str, str | None]:
    """The text and the reason, rule by rule."""
    reasons: list[tuple[str, bool]] = []
    if c4 := config.c4:
        text, s = reference.c4(text, c4)
        reasons += [
            ("c4: lorem ipsum", c4.reject_lorem_ipsum and s["lorem_ipsum_lines"] > 0),
            ("c4: curly bracket", c4.reject_curly_bracket and s["curly_bracket_lines"] > 0),
            ("c4: too few sentences", c4.min_sentences is not None and s["sentences"] < c4.min_sentences),
        ]
    s = reference.statistics(text, config.gopher_quality, config.fineweb)
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    reasons += [
        ("empty", not text.strip()),
        ("too short", below(len(text), config.min_chars)),
        ("too long", above(len(text), config.max_chars)),
        ("few letters and digits", below(ratio(s["alphanumerics"], len(text)), config.min_alphanumeric_share)),
        ("many digits", above(ratio(s["digits"], len(text)), config.max_digit_share)),
        (
            "repeated lines",
            len(lines) >= 5 and above(ratio(len(lines) - len(set(lines)), len(lines)), config.max_repeated_line_share),
        ),
    ]
    reasons += quality_reasons(s, config.gopher_quality) if config.gopher_quality else []
    reasons += repetition_reasons(s, config.gopher_repetition) if config.gopher_repetition else []
    reasons += fineweb_reasons(s, config.fineweb) if config.fineweb else []
    return text, next((reason for reason, fires in reasons if fires), None)


def quality_reasons(s: dict, config: GopherQualityConfig) -> list[tuple[str, bool]]:
    length = ratio(s["word_chars"], s["words"])
    return [
        ("gopher: too few words", below(s["words"], config.min_words)),
        ("gopher: too many words", above(s["words"], config.max_words)),
        ("gopher: short words", below(length, config.min_mean_word_length)),
        ("gopher: long words", above(length, config.max_mean_word_length)),
        ("gopher: many hash signs", above(ratio(s["hash_signs"], s["chunks"]), config.max_hash_signs_per_chunk)),
        ("gopher: many ellipses", above(ratio(s["ellipses"], s["chunks"]), config.max_ellipses_per_chunk)),
        ("gopher: many bullet lines", above(ratio(s["bullet_lines"], s["lines"]), config.max_bullet_line_share)),
        (
            "gopher: many lines end in an ellipsis",
            above(ratio(s["ellipsis_lines"], s["lines"]), config.max_ellipsis_line_share),
        ),
        (
            "gopher: few words with letters",
            below(ratio(s["letter_chunks"], s["chunks"]), config.min_letter_chunk_share),
        ),
        ("gopher: few stop words", below(s["stop_words"], config.min_stop_words)),
    ]


def repetition_reasons(s: dict, config: GopherRepetitionConfig) -> list[tuple[str, bool]]:
    paragraphs, lines, chars = s["paragraphs"], s["filled_lines"], s["code_points"]
    return [
        (
            "gopher: duplicate paragraphs",
            above(ratio(s["duplicate_paragraphs"], paragraphs), config.max_duplicate_paragraph_share),
        ),
        (
            "gopher: characters in duplicate paragraphs",
            above(ratio(s["duplicate_paragraph_chars"], chars), config.max_duplicate_paragraph_char_share),
        ),
        ("gopher: duplicate lines", above(ratio(s["duplicate_lines"], lines), config.max_duplicate_line_share)),
        (
            "gopher: characters in duplicate lines",
            above(ratio(s["duplicate_line_chars"], chars), config.max_duplicate_line_char_share),
        ),
        *(
            (
                f"gopher: top {n}-gram",
                above(ratio(s[f"top_{n}gram_chars"], chars), getattr(config, f"max_top_{n}gram_char_share")),
            )
            for n in (2, 3, 4)
        ),
        *(
            (
                f"gopher: duplicate {n}-grams",
                above(
                    ratio(s[f"duplicate_{n}gram_chars"], chars), getattr(config, f"max_duplicate_{n}gram_char_share")
                ),
            )
            for n in range(5, 11)
        ),
    ]


def fineweb_reasons(s: dict, config: FineWebConfig) -> list[tuple[str, bool]]:
    lines, chars = s["filled_lines"], s["line_chars"]
    return [
        ("fineweb: few lines end a sentence", below(ratio(s["terminal_lines"], lines), config.min_terminal_line_share)),
        ("fineweb: many short lines", above(ratio(s["short_lines"], lines), config.max_short_line_share)),
        (
            "fineweb: characters in duplicate lines",
            above(ratio(s["duplicate_line_chars"], chars), config.max_duplicate_line_char_share),
        ),
        ("fineweb: many line ends", above(ratio(s["newlines"], s["chunks"]), config.max_newlines_per_chunk)),
    ]


def ratio(amount: int, units: int) -> float:
    return amount / units if units else 0.0


def below(value: float, threshold: float | None) -> bool:
    return threshold is not None and value < threshold


def above(value: float, threshold: float | None) -> bool:
    return threshold is not None and value > threshold


def reasons_of(texts: list[str], config: RulesConfig) -> list[str | None]:
    judgement = apply_rules(Texts.of(texts), config)
    assert judgement.reason_codes.dtype == np.int16
    return [None if code == KEEP else judgement.reason_names[code] for code in judgement.reason_codes]


def assert_equal(texts: list[str], config: RulesConfig) -> None:
    truth = [true_judgement(text, config) for text in texts]
    assert reasons_of(texts, config) == [reason for _, reason in truth]
    assert list(apply_rules(Texts.of(texts), config).texts) == [text for text, _ in truth]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_traps_and_real_texts(config):
    """Hand-made texts, sources of Python's library and their docstrings' paragraphs."""
    library = library_texts()
    paragraphs = [paragraph for text in library[:20] for paragraph in text.split("\n\n") if len(paragraph) > 200]
    assert_equal([*TRAPS, *library, *paragraphs], config)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@settings(max_examples=100, deadline=None)
@given(texts=st.lists(random_texts, max_size=4))
def test_random_texts(config, texts):
    """Any Unicode."""
    assert_equal(texts, config)


PROSE = "\n".join(
    f"The {name} sat on the wall of house {number}, and with it sat the whole of the family."
    for number, name in enumerate(["goose", "stork", "crane", "heron", "egret", "raven", "robin", "finch"], 1)
)

QUALITY = {"gopher_quality": GopherQualityConfig()}
REPETITION = {"gopher_repetition": GopherRepetitionConfig()}
NO_TRIPLES = GopherRepetitionConfig(max_top_2gram_char_share=None, max_top_3gram_char_share=None)
NO_PAIRS = GopherRepetitionConfig(max_top_2gram_char_share=None)
FINEWEB = {"fineweb": FineWebConfig()}

EVERY_RULE = {
    "c4: lorem ipsum": ({"c4": C4Config()}, "Lorem ipsum dolor sit amet it. " + PROSE),
    "c4: curly bracket": ({"c4": C4Config()}, PROSE + "\nif (a) { b(); and so on."),
    "c4: too few sentences": ({"c4": C4Config()}, "Only one sentence is here now.\nmenu"),
    "empty": ({}, "\u3000 \n"),
    "too short": ({"min_chars": 5}, "漢字です"),
    "too long": ({"max_chars": 4}, "漢字です。"),
    "few letters and digits": ({"min_alphanumeric_share": 0.5}, "ab--- "),
    "many digits": ({"max_digit_share": 0.5}, "a123"),
    "repeated lines": ({"max_repeated_line_share": 0.4}, "a\nb\na\n a \nb\n\n"),
    "gopher: too few words": (QUALITY, "the word " * 24 + "the --- --- ---"),
    "gopher: too many words": ({"gopher_quality": LOW.model_copy(update={"max_words": 3})}, "the a a a"),
    "gopher: short words": (QUALITY, "of a be " * 40),
    "gopher: long words": (QUALITY, "internationalisation " * 60),
    "gopher: many hash signs": (QUALITY, PROSE + " #tag" * 40),
    "gopher: many ellipses": (QUALITY, PROSE + " well… so... er" * 40),
    "gopher: many bullet lines": (QUALITY, "- " + PROSE.replace("\n", "\n• ")),
    "gopher: many lines end in an ellipsis": (QUALITY, PROSE.replace(".\n", "...\n")),
    "gopher: few words with letters": (QUALITY, PROSE + " 1234" * 40),
    "gopher: few stop words": (QUALITY, "buy cheap shoes " * 30),
    "gopher: duplicate paragraphs": (REPETITION, PROSE + "\n\na" * 3),
    "gopher: characters in duplicate paragraphs": (REPETITION, f"a\n\nb\n\n{PROSE}\n\n{PROSE}"),
    "gopher: duplicate lines": (REPETITION, PROSE + "\na" * 5),
    "gopher: characters in duplicate lines": (
        REPETITION,
        "\n".join(["x" * 40, "x" * 40, *"abcdefgh", "0123456789" * 6]),
    ),
    "gopher: top 2-gram": (REPETITION, " again more ".join("abcdefgh")),
    "gopher: top 3-gram": ({"gopher_repetition": NO_PAIRS}, "one two three"),
    "gopher: top 4-gram": ({"gopher_repetition": NO_TRIPLES}, "one two three four"),
    "fineweb: few lines end a sentence": (FINEWEB, PROSE.replace(".\n", "\n").rstrip(".")),
    "fineweb: many short lines": (FINEWEB, "short.\nshort too.\nand so on."),
    "fineweb: characters in duplicate lines": (FINEWEB, f"{PROSE}\n{PROSE}"),
    "fineweb: many line ends": (FINEWEB, "\n".join(f"{'x' * 40}{number}." for number in range(9))),
}


@pytest.mark.parametrize("reason", EVERY_RULE)
def test_every_rule_fires(reason):
    """A document for each rule that gets its reason from it."""
    config, text = EVERY_RULE[reason]
    config = RulesConfig(**{**OFF, **config})
    assert reasons_of([text], config) == [reason]


def every_set(words: Path) -> RulesConfig:
    """All rules, at their defaults where they have one."""
    words.write_text("heroin")
    return RulesConfig(
        max_digit_share=0.9,
        c4=C4Config(),
        gopher_quality=GopherQualityConfig(),
        gopher_repetition=GopherRepetitionConfig(),
        fineweb=FineWebConfig(),
        bad_words=BadWordsConfig(file=words),
    )


def test_every_rule_has_its_document(tmp_path):
    """The tests above, below (n-grams) and of bad words leave no rule out."""
    reasons = [rule.reason for rule in make_rules(every_set(tmp_path / "words.txt"))]
    others = ["bad words", *(f"gopher: duplicate {length}-grams" for length in range(5, 11))]
    assert len(set(reasons)) == len(reasons)
    assert set(reasons) == {*EVERY_RULE, *others}


def test_a_value_at_its_threshold_stays(tmp_path):
    """On the threshold of every rule a document stays, one step beyond it goes; only an empty one goes at 0."""
    for rule in make_rules(every_set(tmp_path / "words.txt")):
        units = 1 if rule.per is None else 10_000
        statistics = no_statistics(3)
        if rule.per is not None:
            statistics[:, rule.per] = units
        statistics[:, rule.column] = round(rule.threshold * units) + np.array([-1, 0, 1])
        below_goes, above_goes = rule.keep.startswith(">"), rule.keep.startswith("<")
        assert rule.rejects(statistics).tolist() == [below_goes, rule.reason == "empty", above_goes], rule.reason


@pytest.mark.parametrize("length", range(5, 11))
def test_duplicate_ngrams_fire(length):
    """A text whose runs of this many words repeat, and no longer ones."""
    run = " ".join(f"word{number}" for number in range(length))
    text = " ".join(f"{run} {gap}{gap}" for gap in "abcdefgh")
    names = {f"max_top_{n}gram_char_share": None for n in (2, 3, 4)}
    names |= {f"max_duplicate_{n}gram_char_share": None for n in range(5, 11) if n != length}
    config = RulesConfig(**OFF, gopher_repetition=GopherRepetitionConfig(**names))
    fresh = " ".join(f"new{number}" for number in range(80))
    assert reasons_of([text, fresh], config) == [f"gopher: duplicate {length}-grams", None]
    longer = {f"max_duplicate_{n}gram_char_share": 0.1 if n == length + 1 else None for n in range(5, 11)}
    config = RulesConfig(**OFF, gopher_repetition=GopherRepetitionConfig(**{**names, **longer}))
    assert reasons_of([text], config) == [None]


def test_prose_passes_everything(tmp_path):
    """All sets at their defaults keep a page of prose, and C4's rules leave it as it is."""
    (tmp_path / "words.txt").write_text("heroin\nwalls of\n")
    config = RulesConfig(
        c4=C4Config(),
        gopher_quality=GopherQualityConfig(),
        gopher_repetition=None,
        fineweb=FineWebConfig(),
        bad_words=BadWordsConfig(file=tmp_path / "words.txt"),
    )
    judgement = apply_rules(Texts.of([PROSE]), config)
    assert judgement.kept.tolist() == [True]
    assert judgement.texts[0] == PROSE


def test_texts_that_are_not_edited_are_the_same_object():
    """No copy without C4's rules; none of the numbers depends on what else is in the batch."""
    texts = Texts.of(TRAPS)
    assert apply_rules(texts, RulesConfig()).texts is texts
    alone = [reasons_of([text], CONFIGS["all"])[0] for text in TRAPS]
    assert alone == reasons_of(TRAPS, CONFIGS["all"])
    assert apply_rules(Texts.of([]), CONFIGS["all"]).reason_codes.size == 0


def test_the_statistics_are_what_the_rules_compare():
    """Each rule's values and threshold; together, in the rules' order, they give the first reason."""
    texts = Texts.of([*TRAPS, *library_texts(10)])
    config = CONFIGS["all"]
    _, statistics = edit_and_measure(texts, config)
    table = {rule.reason: rule for rule in make_rules(config)}
    assert table["gopher: short words"].threshold == 1.0
    assert all(rule.values(statistics).dtype == np.float64 for rule in table.values())
    compare = {">": np.greater, ">=": np.greater_equal, "<": np.less, "<=": np.less_equal}
    del table["repeated lines"]  # passes documents of few lines
    judgement = apply_rules(texts, config)
    for reason, rule in table.items():
        code = judgement.reason_names.index(reason)
        stays = compare[rule.keep](rule.values(statistics), rule.threshold)
        assert stays[(judgement.reason_codes == KEEP) | (judgement.reason_codes > code)].all()
        assert not stays[judgement.reason_codes == code].any()


@pytest.mark.parametrize(
    ("words", "settings", "text", "rejected"),
    [
        ("bad\n\n worse thing \n", {}, "It is BAD.", True),
        ("bad\n\n worse thing \n", {}, "It is a Worse Thing!", True),
        ("bad\n\n worse thing \n", {}, "badly worse things, bad_1", False),
        ("bad", {"max_share": 0.25}, "bad a b c", False),
        ("bad", {"max_share": 0.25}, "bad bad b c", True),
        ("汚い", {}, "それは汚いです", False),
        ("汚い", {"whole_words": False}, "それは汚いです", True),
        ("straße", {}, "STRASSE und Straße", True),
    ],
)
def test_bad_words(tmp_path, words, settings, text, rejected):
    """Whole words in any case, phrases, a share, and scripts without blanks."""
    path = tmp_path / "words.txt"
    path.write_text(words, encoding="utf-8")
    config = RulesConfig(**OFF, bad_words=BadWordsConfig(file=path, **settings))
    assert reasons_of([text], config) == ["bad words" if rejected else None]


def test_a_list_of_bad_words_that_cannot_be_used(tmp_path):
    """Says what is wrong and what to do."""
    path = tmp_path / "words.txt"
    config = RulesConfig(bad_words=BadWordsConfig(file=path))
    with pytest.raises(DataError, match=r"words\.txt: cannot read the list of bad words \(No such file"):
        apply_rules(Texts.of(["a"]), config)
    path.write_bytes(b"\n \n")
    with pytest.raises(DataError, match=r"words\.txt: the list of bad words is empty; write one"):
        apply_rules(Texts.of(["a"]), config)
    path.write_bytes(b"caf\xe9\n\n")
    with pytest.raises(DataError, match=r"words\.txt: the list of bad words is not UTF-8; save it"):
        apply_rules(Texts.of(["a"]), config)
    path.write_text("\ufeffgoon")  # with a byte-order mark, as some editors write it
    assert reasons_of(["the quiet goon " * 9], config) == ["bad words"]


def test_defaults_are_those_of_the_papers():
    """Sets are off, the basic rules are on, and nothing unknown is accepted."""
    config = RulesConfig()
    assert [config.c4, config.gopher_quality, config.gopher_repetition, config.fineweb, config.bad_words] == [None] * 5
    assert (config.min_chars, config.max_chars) == (50, 10_000_000)
    assert (config.min_alphanumeric_share, config.max_repeated_line_share) == (0.25, 0.3)
    with pytest.raises(ValueError, match="max_symbols"):
        GopherQualityConfig(max_symbols=1)
    with pytest.raises(ValueError, match="less than or equal to 1"):
        FineWebConfig(max_short_line_share=1.5)
