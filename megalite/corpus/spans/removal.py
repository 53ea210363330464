"""What becomes of the documents in which spans were found: cut, dropped whole, or left alone.

One thing cannot be had by any order of the steps: a passage counts as repeated because it stands in an earlier
document, and that one may itself be dropped for other repeats it holds. Then the passage is gone altogether. Dropping
only documents that are mostly repeats (`max_repeated_share`) keeps this loss small; 1 avoids it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megalite.corpus.spans.contamination import Overlaps
from megalite.corpus.spans.settings import DecontaminateConfig, SubstringConfig
from megalite.texts import Texts


class Removal(NamedTuple):
    """The documents after it."""

    texts: Texts
    """As many as before, some of them shorter."""
    is_kept: np.ndarray
    """Which of them go on, bool [texts]. Those that do not are whole, as they were before."""
    num_cut: int
    """Kept documents that became shorter."""


def remove_repeats(texts: Texts, spans: np.ndarray, config: SubstringConfig) -> Removal:
    """Drop documents of which too large a share is repeated; cut the passages out of the others, if so asked.

    Args:
        texts: documents.
        spans: int64 [n, 3], merged: the repeated bytes.
        config: settings.
    """
    from megalite.corpus.spans.cutting import covered_bytes

    share = covered_bytes(spans, len(texts)) / np.maximum(texts.lengths, 1)
    return _remove(texts, spans, share > config.max_repeated_share, cuts=config.action == "cut")


def remove_lines(texts: Texts, spans: np.ndarray) -> Removal:
    """Cut lines out of documents; one without any other text is dropped.

    Args:
        texts: documents.
        spans: int64 [n, 3], merged: whole lines.
    """
    return _remove(texts, spans, np.zeros(len(texts), bool), cuts=True)


def remove_overlaps(texts: Texts, overlaps: Overlaps, config: DecontaminateConfig) -> Removal:
    """Drop contaminated documents, or cut the matching words out of them.

    Args:
        texts: documents.
        overlaps: what they share with the evaluation sets.
        config: settings.
    """
    contaminated = overlaps.contaminated(config)
    if config.action == "drop":
        return _remove(texts, overlaps.spans, contaminated, cuts=False)
    spans = overlaps.spans[contaminated[overlaps.spans[:, 0]]]
    return _remove(texts, spans, np.zeros(len(texts), bool), cuts=True)


def _remove(texts: Texts, spans: np.ndarray, is_dropped: np.ndarray, *, cuts: bool) -> Removal:
    """Cut the spans of documents that are not dropped; drop those of which only blanks would be left."""
    if not cuts:
        return Removal(texts, ~is_dropped, 0)
    from megalite.corpus.spans.cutting import cut, has_ink, trim_to_words

    trimmed = trim_to_words(texts, spans[~is_dropped[spans[:, 0]]])
    is_cut = np.zeros(len(texts), bool)
    is_cut[trimmed[:, 0]] = True
    rest = cut(texts, trimmed)
    is_empty = is_cut & ~has_ink(rest.buffer, rest.offsets)
    if is_empty.any():
        trimmed = trimmed[~is_empty[trimmed[:, 0]]]
        rest = cut(texts, trimmed)
    return Removal(rest, ~(is_dropped | is_empty), int(np.count_nonzero(is_cut & ~is_empty)))
