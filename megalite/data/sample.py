"""What training samples hold: pieces of documents laid end to end, with their labels, borders and positions.

The rules, which `gather.py` follows for many samples at once:

    tokens      the pieces, then NO_TOKEN
    labels      the next token of the row; NO_TOKEN where the mask is False. The last label is read ahead from the
                stream, so that a cut inside a document loses no label
    loss_mask   with document masks no label crosses a border; without them only padding has none, and the last token
                of the row where the text does not go on
    weights     of data with loss weights: that of the label, 0 where the mask is False. A label of weight 0 is none
    positions   with document masks they count from 0 in each piece, and in the padding; without, through the row
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

NO_TOKEN = 0
"""Stands where there is no token or no label. It is never learned from: the loss mask is False there."""

NO_DOCUMENT = -1
"""Document id of padding."""


@dataclass(frozen=True)
class Sample:
    """One sequence; every array is [seq_len]."""

    tokens: np.ndarray
    """int64 input ids."""
    labels: np.ndarray
    """int64 id of the next token; 0 where there is none."""
    loss_mask: np.ndarray
    """bool, True where the label counts."""
    document_ids: np.ndarray
    """int64, one number for each document of the data; -1 is padding."""
    positions: np.ndarray
    """int64 place of the token: in its document, padding taken as one, or in the sequence when there are no document
    masks. A document cut by a sample's start begins at 0 there. 0 always begins a span of attention."""
    weights: np.ndarray | None = None
    """float32 weight of the label in the loss; None where all that count weigh 1."""


class DocumentPieces(NamedTuple):
    """The pieces of documents in one sample, in order: int64 [pieces] each."""

    starts: np.ndarray
    """Position in the stream of tokens."""
    lengths: np.ndarray
    """Tokens."""
    documents: np.ndarray
    """Document in the stream."""


class Cut(NamedTuple):
    """Pieces of many samples: those of sample s are borders[s] to borders[s + 1] of the other columns."""

    borders: np.ndarray
    """int64 [samples + 1]"""
    starts: np.ndarray
    """int64 [pieces]: place in the stream."""
    lengths: np.ndarray
    """[pieces] tokens; int32 on disk."""
    documents: np.ndarray
    """int64 [pieces]: document in the stream."""


class SampleRows(NamedTuple):
    """Samples one below the other; every array is [rows, seq_len]."""

    tokens: np.ndarray
    """int64, as in `Sample`."""
    labels: np.ndarray
    """int64"""
    positions: np.ndarray
    """int64"""
    loss_mask: np.ndarray
    """bool"""
    document_ids: np.ndarray
    """int64, counted within the row's source; [0, 0] when they are not wanted."""
    weights: np.ndarray
    """float32, as in `Sample`; [0, 0] where all labels weigh 1."""


def empty_rows(num_rows: int, seq_len: int, *, document_ids: bool, weights: bool = False) -> SampleRows:
    """Rows to be filled, in memory as it comes.

    Args:
        num_rows: how many.
        seq_len: tokens in each.
        document_ids: whether they are wanted too; training does not need them.
        weights: whether labels have weights.
    """
    tokens, labels, positions = np.empty((3, num_rows, seq_len), np.int64)
    loss_mask = np.empty((num_rows, seq_len), np.bool_)
    of_documents = np.empty((num_rows, seq_len) if document_ids else (0, 0), np.int64)
    of_labels = np.empty((num_rows, seq_len) if weights else (0, 0), np.float32)
    return SampleRows(tokens, labels, positions, loss_mask, of_documents, of_labels)


def first_sample(rows: SampleRows, first_document: int) -> Sample:
    """The first of some rows, which have document ids, by itself.

    Args:
        first_document: number of the source's first document among those of all sources.
    """
    ids = rows.document_ids[0]
    ids[ids != NO_DOCUMENT] += first_document
    weights = rows.weights[0] if rows.weights.size else None
    return Sample(rows.tokens[0], rows.labels[0], rows.loss_mask[0], ids, rows.positions[0], weights)
