"""C4's rules (Raffel et al. 2020, 2.2): keep the lines that are sentences, then documents with enough of them.

They mean what they mean in C4's code, with these differences:

1.  Lines end at "\\n" alone; repaired text has no other line ends.
2.  Where a citation was cut from the end of a line, the blank before it goes too, so that "So he said. [3]" ends with
    a full stop. Where one was cut from the beginning of the text, the blank behind it stays.
3.  Sentences are counted by their marks: . ! ? before a blank or the line's end, quotes and brackets between them
    allowed, and the full-width marks anywhere; a line has at least one. C4 runs NLTK's trained model, which knows that
    "Mr. Bell" is no end. Only the least number of sentences depends on it.
4.  Letters A to Z are compared without regard to case; C4 lowers all of Unicode, in which the Kelvin sign is a k.
5.  C4 stops at the first "lorem ipsum" or "{"; here both are looked for, and the reason names the first of this list.

`compat: datatrove` does 2 and 3 as datatrove's filter does: blanks beside a citation stay, so "So he said. [3]" ends
with a blank and is dropped, and sentences are counted by spaCy's words. 4 stays, and lines of citations alone at the
ends of a text count for no sentence.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from megalite.corpus.rules.c4_lines import LineRules, edit_documents
from megalite.corpus.rules.characters import character_classes
from megalite.corpus.rules.columns import CURLY_BRACKET_LINES, LOREM_IPSUM_LINES, SENTENCES
from megalite.corpus.rules.phrases import make_phrases
from megalite.corpus.rules.rule import Rule, rules_that_are_on
from megalite.corpus.rules.settings import DATATROVE, C4Config
from megalite.kernel import read_only
from megalite.texts import Texts


def c4_rules(config: C4Config) -> list[Rule]:
    """The rules of C4 that reject documents and are on."""
    return rules_that_are_on(
        ("c4: lorem ipsum", LOREM_IPSUM_LINES, None, "<=", 0 if config.reject_lorem_ipsum else None),
        ("c4: curly bracket", CURLY_BRACKET_LINES, None, "<=", 0 if config.reject_curly_bracket else None),
        ("c4: too few sentences", SENTENCES, None, ">=", config.min_sentences),
    )


def edit_lines(texts: Texts, config: C4Config, statistics: np.ndarray) -> Texts:
    """The texts without the lines that C4 drops.

    Args:
        texts: to edit.
        config: C4's settings.
        statistics: int64 [documents, columns], whose columns of C4 are filled.
    """
    out = np.empty(texts.num_bytes, np.uint8)
    offsets = np.empty(texts.offsets.size, np.int64)
    buffer, begins = read_only(texts.buffer), read_only(texts.offsets)
    edit_documents(buffer, begins, _line_rules(config), out, read_only(out), offsets, statistics)
    return Texts(out[: offsets[-1]], offsets)


@lru_cache(maxsize=4)
def _line_rules(config: C4Config) -> LineRules:
    lorem_ipsum = ["lorem ipsum"] if config.reject_lorem_ipsum else []
    javascript = ["javascript"] if config.drop_javascript_lines else []
    return LineRules(
        classes=character_classes(config.terminal_characters),
        phrases=make_phrases([lorem_ipsum, javascript, config.policy_phrases]),
        terminal=config.terminal_punctuation,
        min_words=config.min_words_per_line or 0,
        max_word_length=config.max_word_length or 0,
        citations=config.remove_citations,
        keeps_blanks=config.compat == DATATROVE,
    )
