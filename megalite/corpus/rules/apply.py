"""Apply the rules to a batch of texts: edit, measure, and give each document that fails the reason.

    texts -> c4: edit lines -> measure -> rules in order, the first that fires names the reason
             (only if on)      (twice where some count as datatrove does)
                                          c4, basic, gopher quality, gopher repetition, fineweb, bad words, code,
                                          plug-ins'

C4's rules come first because they edit: all other rules judge the text that would be kept, so a page that was mostly
menus is judged by its sentences, and one that shrank to two lines is too short.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megalite.corpus.rules.bad_words import bad_word_rules, read_bad_words
from megalite.corpus.rules.brought import brought_rules, with_brought
from megalite.corpus.rules.c4 import c4_rules, edit_lines
from megalite.corpus.rules.code import code_rules, measure_code
from megalite.corpus.rules.datatrove import measure_as_datatrove
from megalite.corpus.rules.fineweb import fineweb_rules
from megalite.corpus.rules.gopher import quality_rules, repetition_rules
from megalite.corpus.rules.repetition import DUPLICATE_LENGTHS, TOP_LENGTHS
from megalite.corpus.rules.rule import Rule, basic_rules
from megalite.corpus.rules.settings import GopherRepetitionConfig, RulesConfig, counts_as_datatrove
from megalite.corpus.rules.statistics import measure, no_statistics
from megalite.texts import Texts

KEEP = -1


@dataclass(frozen=True)
class RulesResult:
    """What came of a batch."""

    texts: Texts
    """The texts as C4's rules leave them; the very object that came in when these are off."""
    reason_codes: np.ndarray
    """int16 [documents]: KEEP, or the index in reason_names of the first rule that fired."""
    reason_names: tuple[str, ...]
    """Reasons of all rules that are on, in their order."""

    @property
    def kept(self) -> np.ndarray:
        """Which documents stay, bool [documents]."""
        return self.reason_codes == KEEP


def make_rules(config: RulesConfig) -> list[Rule]:
    """All rules that are on, in the order in which they are asked."""
    rules = c4_rules(config.c4) if config.c4 else []
    rules += basic_rules(config)
    rules += quality_rules(config.gopher_quality) if config.gopher_quality else []
    rules += repetition_rules(config.gopher_repetition) if config.gopher_repetition else []
    rules += fineweb_rules(config.fineweb) if config.fineweb else []
    rules += bad_word_rules(config.bad_words) if config.bad_words else []
    rules += code_rules(config.code) if config.code else []
    rules += brought_rules(config.custom)
    return rules


def apply_rules(texts: Texts, config: RulesConfig) -> RulesResult:
    """Edit and measure a batch, and find the first rule that each document fails.

    Args:
        texts: the documents, after the repair.
        config: which rules.

    Raises:
        DataError: the list of bad words cannot be used, or a plug-in's rule fails.
    """
    texts, statistics = edit_and_measure(texts, config)
    rules = make_rules(config)
    codes = np.full(len(texts), KEEP, np.int16)
    for code, rule in enumerate(rules):
        codes[(codes == KEEP) & rule.rejects(statistics)] = code
    return RulesResult(texts, codes, tuple(rule.reason for rule in rules))


def edit_and_measure(texts: Texts, config: RulesConfig) -> tuple[Texts, np.ndarray]:
    """The texts as C4's rules leave them, and the statistics that the other rules compare (see `columns.py`)."""
    statistics = no_statistics(len(texts))
    if config.c4:
        texts = edit_lines(texts, config.c4, statistics)
    measure(
        texts,
        statistics,
        quality=config.gopher_quality,
        fineweb=config.fineweb,
        bad_words=read_bad_words(config.bad_words) if config.bad_words else None,
        whole_words=config.bad_words is None or config.bad_words.whole_words,
        repetition=config.gopher_repetition is not None and _wants_grams(config.gopher_repetition),
    )
    if counts_as_datatrove(config):
        measure_as_datatrove(texts, statistics, config)
    if config.code:
        measure_code(texts, statistics, config.code)
    return texts, with_brought(statistics, texts, config.custom)


def _wants_grams(config: GopherRepetitionConfig) -> bool:
    """Whether `measure` is to count n-grams: some rule on them is on, and they are of our words."""
    if config.compat is not None:
        return False
    names = [f"max_top_{length}gram_char_share" for length in TOP_LENGTHS]
    names += [f"max_duplicate_{length}gram_char_share" for length in DUPLICATE_LENGTHS]
    return any(getattr(config, name) is not None for name in names)
