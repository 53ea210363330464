"""Gopher's rules (Rae et al. 2021, appendix A.1): quality, then repetition.

They mean what they mean in datatrove 0.10, the filters that made FineWeb, with these differences:

1.  Words. datatrove runs a tokenizer for each language; its English one, spaCy's, parts "don't" into "do" and "n't",
    and every comma is a word, and every equal sign of a row of them. Here blanks part chunks, and a word is a chunk
    without the punctuation at its ends. So there are fewer words (about a fifth in prose, half in program text), they
    are a little longer, and ratios to the number of words come out larger. Lengths and symbols have their thresholds
    from the paper, which counts words as we do.
2.  Punctuation is Unicode's P and S; datatrove lists characters. An emoji or an arrow is no word here.
3.  Letter share: datatrove counts each punctuation token as a word without a letter, which fails three in four
    technical documents; here only chunks without any letter count.
4.  Lines end at "\\n" alone, and a document that ends with one has an empty last line. Repaired text has neither
    other line ends nor empty lines at its end, where this changes nothing.
5.  Duplicate lines: blank lines are neither counted nor compared. Paragraphs are parted by blank lines, not only by
    empty ones. Equal on repaired text but for blanks before the first word.
6.  N-grams of words: chunks of pure punctuation take part as they are, and are one word. There each of their marks is,
    and the marks of program text recur everywhere: five words there are two or three of ours, which is why datatrove's
    rule on 5-grams throws out programs and tables. "ab c" and "a bc" are different here.
7.  A document without words fails the rules on words; datatrove divides by zero.

`compat: datatrove` does 1, 2, 3, 5 and 6 as datatrove does. What is left, none of it seen in real documents: 7; 4 in
text that was not repaired; nothing but marks has a mean length of 0 here, and there one that is no number, which is
never too short; a threshold of 0 is off there; and `english.py` names two things about words. docs/benchmarks/rules.md
has the figures.

Scripts without blanks have chunks as long as a clause: leave out the rules on words for Chinese, Japanese, Thai.
"""

from __future__ import annotations

from megalite.corpus.rules.columns import (
    BULLET_LINES,
    CHUNKS,
    CODE_POINTS,
    DUPLICATE_5GRAM_CHARS,
    DUPLICATE_LINE_CHARS,
    DUPLICATE_LINES,
    DUPLICATE_PARAGRAPH_CHARS,
    DUPLICATE_PARAGRAPHS,
    DUPLICATE_SPLIT_LINE_CHARS,
    DUPLICATE_SPLIT_LINES,
    ELLIPSES,
    ELLIPSIS_LINES,
    FILLED_LINES,
    HASH_SIGNS,
    LETTER_CHUNKS,
    LINES,
    PARAGRAPHS,
    SPLIT_LINES,
    STOP_WORDS,
    TOKENS,
    TOKENS_WITH_LETTER,
    TOP_2GRAM_CHARS,
    WORD_CHARS,
    WORD_TOKEN_CHARS,
    WORD_TOKEN_STOP_WORDS,
    WORD_TOKENS,
    WORDS,
)
from megalite.corpus.rules.rule import Rule, rules_that_are_on
from megalite.corpus.rules.settings import DATATROVE, GopherQualityConfig, GopherRepetitionConfig


def quality_rules(config: GopherQualityConfig) -> list[Rule]:
    """Gopher's quality rules that are on."""
    chunks, letters, words, word_chars, stop_words = CHUNKS, LETTER_CHUNKS, WORDS, WORD_CHARS, STOP_WORDS
    if config.compat == DATATROVE:
        chunks, letters, words, word_chars = TOKENS, TOKENS_WITH_LETTER, WORD_TOKENS, WORD_TOKEN_CHARS
        stop_words = WORD_TOKEN_STOP_WORDS
    return rules_that_are_on(
        ("gopher: too few words", words, None, ">=", config.min_words),
        ("gopher: too many words", words, None, "<=", config.max_words),
        ("gopher: short words", word_chars, words, ">=", config.min_mean_word_length),
        ("gopher: long words", word_chars, words, "<=", config.max_mean_word_length),
        ("gopher: many hash signs", HASH_SIGNS, chunks, "<=", config.max_hash_signs_per_chunk),
        ("gopher: many ellipses", ELLIPSES, chunks, "<=", config.max_ellipses_per_chunk),
        ("gopher: many bullet lines", BULLET_LINES, LINES, "<=", config.max_bullet_line_share),
        ("gopher: many lines end in an ellipsis", ELLIPSIS_LINES, LINES, "<=", config.max_ellipsis_line_share),
        ("gopher: few words with letters", letters, chunks, ">=", config.min_letter_chunk_share),
        ("gopher: few stop words", stop_words, None, ">=", config.min_stop_words),
    )


def repetition_rules(config: GopherRepetitionConfig) -> list[Rule]:
    """Gopher's repetition rules that are on."""
    all_lines, repeated, repeated_chars = FILLED_LINES, DUPLICATE_LINES, DUPLICATE_LINE_CHARS
    if config.compat == DATATROVE:
        all_lines, repeated, repeated_chars = SPLIT_LINES, DUPLICATE_SPLIT_LINES, DUPLICATE_SPLIT_LINE_CHARS
    lines, paragraphs = config.max_duplicate_line_share, config.max_duplicate_paragraph_share
    line_chars, paragraph_chars = config.max_duplicate_line_char_share, config.max_duplicate_paragraph_char_share
    top = (config.max_top_2gram_char_share, config.max_top_3gram_char_share, config.max_top_4gram_char_share)
    duplicate = (
        config.max_duplicate_5gram_char_share,
        config.max_duplicate_6gram_char_share,
        config.max_duplicate_7gram_char_share,
        config.max_duplicate_8gram_char_share,
        config.max_duplicate_9gram_char_share,
        config.max_duplicate_10gram_char_share,
    )
    return rules_that_are_on(
        ("gopher: duplicate paragraphs", DUPLICATE_PARAGRAPHS, PARAGRAPHS, "<=", paragraphs),
        (
            "gopher: characters in duplicate paragraphs",
            DUPLICATE_PARAGRAPH_CHARS,
            CODE_POINTS,
            "<=",
            paragraph_chars,
        ),
        ("gopher: duplicate lines", repeated, all_lines, "<=", lines),
        ("gopher: characters in duplicate lines", repeated_chars, CODE_POINTS, "<=", line_chars),
        *(
            (f"gopher: top {length}-gram", TOP_2GRAM_CHARS + length - 2, CODE_POINTS, "<=", share)
            for length, share in enumerate(top, 2)
        ),
        *(
            (f"gopher: duplicate {length}-grams", DUPLICATE_5GRAM_CHARS + length - 5, CODE_POINTS, "<=", share)
            for length, share in enumerate(duplicate, 5)
        ),
    )
