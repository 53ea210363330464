"""Documents with words from a list (C4; Raffel et al. 2020, 2.2). The list is the user's; none comes with megalite.

An occurrence is the phrase as the list spells it, blanks included, in any case of letters (`phrases.py`), with no
letter, digit or underscore beside it. Scripts without blanks need `whole_words: false`, which finds it anywhere.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from megalite.corpus.rules.columns import BAD_WORDS, CHUNKS
from megalite.corpus.rules.phrases import Phrases, make_phrases
from megalite.corpus.rules.rule import Rule, rules_that_are_on
from megalite.corpus.rules.settings import BadWordsConfig
from megalite.errors import DataError


def bad_word_rules(config: BadWordsConfig) -> list[Rule]:
    """The rule on listed words."""
    return rules_that_are_on(("bad words", BAD_WORDS, CHUNKS, "<=", config.max_share))


def read_bad_words(config: BadWordsConfig) -> Phrases:
    """The list of a config, ready to be looked for.

    Raises:
        DataError: the file cannot be read, is not UTF-8 or names no words.
    """
    try:
        changed = config.file.stat().st_mtime_ns
    except OSError as error:
        raise _unreadable(config.file, error) from error
    return _read(config.file, changed)


@lru_cache(maxsize=4)
def _read(path: Path, _changed: int) -> Phrases:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: the list of bad words is not UTF-8; save it as UTF-8, one phrase a line") from error
    except OSError as error:
        raise _unreadable(path, error) from error
    words = [word for line in lines if (word := line.strip())]
    if not words:
        raise DataError(f"{path}: the list of bad words is empty; write one word or phrase a line, or leave it out")
    return make_phrases([words])


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path}: cannot read the list of bad words ({error.strerror}); name a text file")
