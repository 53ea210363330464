"""One training sample as arrays: pieces of documents laid end to end, with their labels, borders and positions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megalite.data.indexed import IndexedTokens
from megalite.data.layout import Pieces

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


def assemble(
    tokens: IndexedTokens, pieces: Pieces, seq_len: int, *, document_masks: bool, stream_goes_on: bool
) -> Sample:
    """Build the arrays of one sample.

    The label of the last token is read ahead from the stream, so that a cut inside a document loses no label.

    Args:
        tokens: the stream the pieces point into.
        pieces: what the sample is made of, at most seq_len tokens.
        seq_len: length of the arrays; what the pieces leave free is padding.
        document_masks: documents do not see each other: positions restart, and no label crosses a border.
        stream_goes_on: without masks, the token behind the last one is its label even in another document.
    """
    filled = int(pieces.lengths.sum())
    ids = np.full(seq_len + 1, NO_TOKEN, dtype=np.int64)
    document_ids = np.full(seq_len, NO_DOCUMENT, dtype=np.int64)
    positions = np.arange(seq_len, dtype=np.int64)
    loss_mask = np.zeros(seq_len, dtype=np.bool_)
    loss_mask[: filled - 1] = True

    place = 0
    for start, length, document in zip(*(column.tolist() for column in pieces), strict=True):
        ids[place : place + length] = tokens.read(start, start + length)
        document_ids[place : place + length] = document
        if document_masks:
            positions[place : place + length] = np.arange(length)
            loss_mask[place + length - 1] = False
        place += length
    if document_masks:
        positions[filled:] -= filled

    labels = ids[1:].copy()
    following = int(pieces.starts[-1] + pieces.lengths[-1])
    if following < tokens.num_tokens:
        same_document = tokens.document_at(following) == pieces.documents[-1]
        if same_document or (stream_goes_on and not document_masks):
            labels[filled - 1] = tokens.read(following, following + 1)[0]
            loss_mask[filled - 1] = True
    labels[~loss_mask] = NO_TOKEN
    return Sample(ids[:-1], labels, loss_mask, document_ids, positions)
