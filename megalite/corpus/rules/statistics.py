"""The measures of a batch of texts: every column that the rules may ask for, in one pass over the bytes.

    texts -> scan.py: characters, words, lines  ->  repetition.py: n-grams  ->  int64 [documents, columns]
             duplicates.py: lines, paragraphs       only when a rule wants them

All memory is taken once for a batch, as much as its longest document may need (up to 40 bytes for each of its bytes,
touched only as its words and lines fill it), and used again for each document.
"""

from __future__ import annotations

import numpy as np

from megalite.corpus.rules.characters import character_classes
from megalite.corpus.rules.columns import BAD_WORDS, CHUNKS, NUM_COLUMNS
from megalite.corpus.rules.duplicates import HashTable, make_table
from megalite.corpus.rules.phrases import Phrases, count_phrases
from megalite.corpus.rules.repetition import LONGEST, Grams, make_grams, measure_repetition
from megalite.corpus.rules.scan import WORD, ScanSettings, Units, make_units, make_word_set, scan_document
from megalite.corpus.rules.settings import FineWebConfig, GopherQualityConfig
from megalite.kernel import bare_kernel, read_only
from megalite.texts import Texts


def no_statistics(num_documents: int) -> np.ndarray:
    """Zeros, int64 [documents, columns]."""
    return np.zeros((num_documents, NUM_COLUMNS), np.int64)


def measure(
    texts: Texts,
    statistics: np.ndarray,
    *,
    quality: GopherQualityConfig | None = None,
    fineweb: FineWebConfig | None = None,
    bad_words: Phrases | None = None,
    whole_words: bool = True,
    repetition: bool = True,
) -> None:
    """Fill the columns of all texts, but for C4's.

    Args:
        texts: what to measure.
        statistics: int64 [documents, columns], zeros but for C4's columns.
        quality: says which words are stop words; null for the defaults.
        fineweb: says what a short line is, and what ends a sentence; null for the defaults.
        bad_words: phrases to count.
        whole_words: count them only where no character of a word touches them.
        repetition: whether to fill the n-grams' columns too.
    """
    quality, fineweb = quality or GopherQualityConfig(), fineweb or FineWebConfig()
    classes = character_classes(fineweb.terminal_characters)
    meaning = ScanSettings(classes, make_word_set(quality.stop_words), fineweb.short_line_chars)
    buffer, offsets = read_only(texts.buffer), read_only(texts.offsets)
    units = make_units(int(texts.lengths.max(initial=0)))
    most_units = units.hashes.shape[1]
    grams = make_grams(most_units if repetition else 0)
    _measure(buffer, offsets, meaning, units, grams, make_table(most_units), statistics)
    if bad_words is not None:
        _count_bad_words(buffer, offsets, bad_words, classes, whole_words, statistics)


@bare_kernel
def _measure(
    buffer: np.ndarray,
    offsets: np.ndarray,
    meaning: ScanSettings,
    units: Units,
    grams: Grams,
    table: HashTable,
    statistics: np.ndarray,
) -> None:
    for document in range(offsets.size - 1):
        row = statistics[document]
        scan_document(buffer, offsets[document], offsets[document + 1], meaning, units, table, row)
        if grams.names.size:
            measure_repetition(units.hashes[WORD], units.num_chars[WORD], row[CHUNKS], grams, table, row, LONGEST)


@bare_kernel
def _count_bad_words(
    buffer: np.ndarray,
    offsets: np.ndarray,
    phrases: Phrases,
    classes: np.ndarray,
    whole_words: bool,
    statistics: np.ndarray,
) -> None:
    for document in range(offsets.size - 1):
        start, end = offsets[document], offsets[document + 1]
        statistics[document, BAD_WORDS] = count_phrases(buffer, start, end, phrases, classes, whole_words)
