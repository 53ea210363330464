"""The language of each text, by the model that py3langid carries in its package. The one file that imports it.

    sample       the first 2 kB and 2 kB of the middle: a head alone is often a menu or a licence in English
    features     an automaton over bytes counts the character sequences that tell languages apart
    scores       log(1 + count) times the weights of each language (naive Bayes; Lui and Baldwin 2012), then a softmax
                 whose temperature is the square root of the sample's length

The package walks its automaton in Python, at some 13 MB of sample a second. Here the same tables are walked by a
compiled loop; a test holds the two against each other. Texts should have been repaired: the model knows composed
characters.

This module needs numba at import; import it where a station begins.
"""

from __future__ import annotations

import unicodedata
from functools import lru_cache
from typing import NamedTuple

import numba
import numpy as np

from megalite.errors import UnavailableError
from megalite.kernel import kernel
from megalite.texts import Texts

HEAD_BYTES = 2048

MIDDLE_BYTES = 2048

UNDETERMINED = "und"
"""Code of a text without any feature: empty, or nothing but digits and signs (ISO 639-2)."""


class LanguageTables(NamedTuple):
    """py3langid's tables."""

    next_rows: np.ndarray
    """int32 [rows * 256]: the state that follows, by row and byte."""
    row_of: np.ndarray
    """int32 [states]: the row of a state; many share one."""
    feature_of: np.ndarray
    """int32 [states]: the feature that is complete in a state, or -1."""
    weights: np.ndarray
    """float32 [features, labels]."""
    priors: np.ndarray
    """float32 [labels]."""
    label_of: np.ndarray
    """int64 [labels]: the label to report for one; a language in two scripts has two."""
    codes: list[str]
    """ISO 639 code of each label."""


def identify(texts: Texts) -> tuple[list[str], np.ndarray]:
    """The language of each text.

    Returns:
        ISO 639 codes (UNDETERMINED where nothing tells), and the probability of each, float32 [texts]. Below about 0.5
        it is a guess: a mixture, a list, program text.

    Raises:
        UnavailableError: py3langid is not installed.
    """
    model = load_model()
    samples = Texts.of(_sample(texts, document) for document in range(len(texts)))
    labels, scores = _score(samples.buffer, samples.offsets, *model[:-1])
    return [UNDETERMINED if label < 0 else model.codes[label] for label in labels.tolist()], scores


@lru_cache(maxsize=1)
def load_model() -> LanguageTables:
    """The model, loaded once a process (half a second, 100 MB)."""
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError as error:
        raise UnavailableError("language identification needs py3langid: pip install 'megalite[data]'") from error
    source = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    codes = list(source.nb_classes)
    return LanguageTables(
        next_rows=np.asarray(source.tk_nextmove, np.int32),
        row_of=np.asarray(source.tk_row, np.int32),
        feature_of=np.asarray(source.tk_output, np.int32),
        weights=np.ascontiguousarray(source.nb_ptc, np.float32),
        priors=np.asarray(source.nb_pc, np.float32),
        label_of=np.array([codes.index(code) for code in codes], np.int64),
        codes=codes,
    )


def _sample(texts: Texts, document: int) -> bytes:
    """Head and middle of a text, or all of a short one."""
    start, end = texts.offsets[document : document + 2].tolist()
    if end - start <= HEAD_BYTES + MIDDLE_BYTES:
        parts = texts.buffer[start:end].tobytes()
    else:
        middle = (start + HEAD_BYTES + end - MIDDLE_BYTES) // 2
        head, rest = texts.buffer[start : start + HEAD_BYTES], texts.buffer[middle : middle + MIDDLE_BYTES]
        parts = head.tobytes() + b"\n" + rest.tobytes()
    if parts.isascii() and not parts.isupper():
        return parts
    text = parts.decode(errors="ignore")  # a cut may go through a character
    return unicodedata.normalize("NFC", text.lower() if text.isupper() else text).encode()


@numba.njit(cache=True, nogil=True, fastmath=True)
def _score(
    buffer: np.ndarray,
    offsets: np.ndarray,
    next_rows: np.ndarray,
    row_of: np.ndarray,
    feature_of: np.ndarray,
    weights: np.ndarray,
    priors: np.ndarray,
    label_of: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Label and probability of each sample; label -1 without features."""
    num_labels = priors.size
    labels = np.full(offsets.size - 1, -1, np.int64)
    best = np.zeros(offsets.size - 1, np.float32)
    counts = np.zeros(weights.shape[0], np.int32)
    seen = np.empty(weights.shape[0], np.int64)
    scores = np.empty(num_labels, np.float32)
    for sample in range(labels.size):
        num_seen, state = 0, 0
        for place in range(offsets[sample], offsets[sample + 1]):
            state = next_rows[row_of[state] << 8 | buffer[place]]
            feature = feature_of[state]
            if feature >= 0:
                if counts[feature] == 0:
                    seen[num_seen] = feature
                    num_seen += 1
                counts[feature] += 1
        if num_seen == 0:
            continue
        scores[:] = priors
        for number in range(num_seen):
            feature = seen[number]
            weight = np.log1p(np.float32(counts[feature]))
            counts[feature] = 0
            for label in range(num_labels):
                scores[label] += weight * weights[feature, label]
        labels[sample], best[sample] = _most_probable(scores, offsets[sample + 1] - offsets[sample], label_of)
    return labels, best


@kernel
def _most_probable(scores: np.ndarray, num_bytes: int, label_of: np.ndarray) -> tuple[np.intp, float]:
    """The most probable label, and its probability; scripts of one language added up."""
    scale = 1.0 / np.sqrt(num_bytes)
    highest = scores.max()
    probabilities = np.zeros(scores.size, np.float64)
    for label in range(scores.size):
        probabilities[label_of[label]] += np.exp((scores[label] - highest) * scale)
    most_probable = probabilities.argmax()
    return most_probable, probabilities[most_probable] / probabilities.sum()
