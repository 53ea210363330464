"""How a stream of tokens is cut into samples of one sequence each: which pieces of which documents a sample holds.

    ConcatLayout   sample i is tokens [i x seq_len, (i + 1) x seq_len) of the stream; its documents are found by
                   bisection, so nothing is stored
    PackedLayout   sample i is the list of pieces that `megalite data pack` chose for it, mapped from disk

Under both, every token is the input of exactly one sample; only the last sample (concat) or the free space that packing
reports is padding.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from megalite.data.indexed import IndexedTokens
from megalite.errors import DataError

BORDERS_FILE = "sample_borders.npy"
STARTS_FILE = "piece_starts.npy"
LENGTHS_FILE = "piece_lengths.npy"
DOCUMENTS_FILE = "piece_documents.npy"


class Pieces(NamedTuple):
    """The pieces of documents in one sample, in order: int64 [pieces] each."""

    starts: np.ndarray
    """Position in the stream of tokens."""
    lengths: np.ndarray
    """Tokens."""
    documents: np.ndarray
    """Document in the stream."""


class Layout(Protocol):
    """A cut of a stream into samples."""

    num_samples: int
    stream_goes_on: bool
    """The token after a sample's last is the next one of the text the model reads, even in another document."""

    def pieces(self, sample: int) -> Pieces:
        """What sample number `sample` is made of; at most seq_len tokens."""
        ...


class ConcatLayout:
    """All documents end to end, cut every seq_len tokens.

    Args:
        tokens: the stream.
        seq_len: tokens in a sample.
    """

    stream_goes_on = True

    def __init__(self, tokens: IndexedTokens, seq_len: int):
        self._tokens = tokens
        self._seq_len = seq_len
        self.num_samples = -(-tokens.num_tokens // seq_len)

    def pieces(self, sample: int) -> Pieces:
        start = sample * self._seq_len
        stop = min(start + self._seq_len, self._tokens.num_tokens)
        first, last = self._tokens.document_at(start), self._tokens.document_at(stop - 1)
        borders = np.clip(self._tokens.document_starts(first, last + 2), start, stop)
        lengths = np.diff(borders)
        filled = lengths > 0
        return Pieces(borders[:-1][filled], lengths[filled], np.arange(first, last + 1)[filled])


class PackedLayout:
    """The cut that a pack station wrote.

    Args:
        folder: the station's folder.
    """

    stream_goes_on = False

    def __init__(self, folder: Path):
        self._borders = _load(folder / BORDERS_FILE)
        self._starts = _load(folder / STARTS_FILE)
        self._lengths = _load(folder / LENGTHS_FILE)
        self._documents = _load(folder / DOCUMENTS_FILE)
        self.num_samples = self._borders.size - 1

    def pieces(self, sample: int) -> Pieces:
        chosen = slice(self._borders[sample], self._borders[sample + 1])
        lengths = self._lengths[chosen].astype(np.int64)
        return Pieces(self._starts[chosen], lengths, self._documents[chosen])


def _load(path: Path) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r").view(np.ndarray)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error}); run `megalite data pack` again") from error
