"""What the rules compare where a recipe says `compat: datatrove`: counted as the filters of datatrove 0.10 count.

    texts --lexicon.py--> words as spaCy cuts them --datatrove_scan.py--> words, repeated runs, sentences
          --------------------------------------------------------------> lines and paragraphs as datatrove parts them

`gopher.py`, `c4.py` and `fineweb.py` say where these filters and our own reading of the papers part.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from megalite.corpus.rules.characters import character_classes
from megalite.corpus.rules.datatrove_scan import LINE_ENDS, RUNS, SENTENCES_OF_LINES, ScratchBuffers, scan_documents
from megalite.corpus.rules.duplicates import make_table
from megalite.corpus.rules.lexicon import Lexicon, hash_of_word
from megalite.corpus.rules.repetition import make_grams
from megalite.corpus.rules.scan import make_hash_set
from megalite.corpus.rules.settings import DATATROVE, RulesConfig
from megalite.kernel import read_only
from megalite.texts import Texts


@lru_cache(maxsize=1)
def english() -> Lexicon:
    """How spaCy cuts English; loaded once a process (three seconds, 200 MB).

    Raises:
        UnavailableError: spaCy is not installed.
    """
    from megalite.corpus.rules.english import English

    language = English()
    return Lexicon(language.cut, list(language.cases), language.end_marks)


def measure_as_datatrove(
    texts: Texts, statistics: np.ndarray, config: RulesConfig, lexicon: Lexicon | None = None
) -> None:
    """Fill the columns that rules with `compat: datatrove` compare.

    Args:
        texts: what to measure, as C4's rules leave them.
        statistics: int64 [documents, columns], filled by `measure`.
        config: the rules.
        lexicon: how words are cut; None is spaCy's English.
    """
    quality, fineweb = config.gopher_quality, config.fineweb
    asked = (
        (RUNS, config.gopher_repetition),
        (LINE_ENDS, fineweb),
        (SENTENCES_OF_LINES, config.c4),
    )
    wanted = sum(flag for flag, family in asked if family is not None and family.compat == DATATROVE)
    most = int(texts.lengths.max(initial=0)) + 1  # each byte may be a word, or part two lines
    scan_documents(
        read_only(texts.buffer),
        read_only(texts.offsets),
        character_classes(fineweb.terminal_characters if fineweb else ""),
        (lexicon or english()).learn(texts),
        make_hash_set([hash_of_word(word) for word in sorted(set(quality.stop_words))] if quality else []),
        ScratchBuffers(
            np.empty(most, np.uint64),
            np.empty(most, np.int32),
            np.empty(most, np.uint8),
            make_grams(most if wanted & RUNS else 0),
            make_table(most),
        ),
        wanted,
        statistics,
    )
