"""Whether the numbers in a token index, or in a packed cut, can be: all of them, or some stretches of a long one.

A hash says that a file is what was written. These checks say that what is there can be read, also where nobody wrote a
hash down (Megatron-LM's own pairs). They look at neighbours only, so a stretch is judged without the rest: before
training that takes milliseconds however long the index is, and `data verify` looks at everything.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megalite.data.sample import Cut

SPAN = 1 << 14
"""Entries in a stretch."""

NUM_SPANS = 64
"""Stretches of a long column that are looked at, evenly spread, both ends among them. A column no longer than all of
them together is looked at as a whole."""

ENTRIES_AT_ONCE = 1 << 20


def stretches(size: int, *, everything: bool) -> Iterator[slice]:
    """The stretches of a column that are looked at, in order."""
    if everything or size <= SPAN * NUM_SPANS:
        step = ENTRIES_AT_ONCE
        yield from (slice(first, min(first + step, size)) for first in range(0, size, step))
        return
    for number in range(NUM_SPANS):
        first = (size - SPAN) * number // (NUM_SPANS - 1)
        yield slice(first, first + SPAN)


def index_damage(
    lengths: np.ndarray, offsets: np.ndarray, borders: np.ndarray, itemsize: int, *, everything: bool
) -> str:
    """What is wrong with an index; empty when nothing is.

    Args:
        lengths: int32 [sequences]: tokens of each.
        offsets: int64 [sequences]: where each begins in the token file, in bytes.
        borders: int64 [documents + 1]: first sequence of each document.
        itemsize: bytes of a token.
        everything: look at all of it.
    """
    if borders[0] != 0 or borders[-1] != lengths.size:
        return f"its documents end at sequence {borders[-1]} of {lengths.size}"
    if lengths.size and offsets[0] != 0:
        return f"its first sequence begins at byte {offsets[0]}"
    for part in stretches(lengths.size, everything=everything):
        if (bad := _first(lengths[part] < 0)) is not None:
            return f"sequence {part.start + bad} has {lengths[part.start + bad]} tokens"
        ends = offsets[part] + lengths[part].astype(np.int64) * itemsize
        begins = offsets[part.start + 1 : part.stop + 1]
        if (bad := _first(ends[: begins.size] != begins)) is not None:
            return f"sequence {part.start + bad} ends at byte {ends[bad]}, the next begins at {begins[bad]}"
    for part in stretches(borders.size - 1, everything=everything):
        if (bad := _first(np.diff(borders[part.start : part.stop + 1]) < 0)) is not None:
            return f"document {part.start + bad} ends before it begins"
    return ""


def cut_damage(cut: Cut, *, seq_len: int, num_tokens: int, num_held: int, num_documents: int, everything: bool) -> str:
    """What is wrong with the pieces of packed samples (`layout.Cut`); empty when nothing is.

    Args:
        cut: of all samples.
        seq_len: tokens in a sample.
        num_tokens: in the stream.
        num_held: in all pieces, some of which may be repeated.
        num_documents: in the stream.
        everything: look at all of it.
    """
    borders, starts, lengths, documents = cut
    if not starts.size == lengths.size == documents.size:
        return f"{starts.size} starts, {lengths.size} lengths and {documents.size} documents of pieces"
    if borders.size < 2 or borders[0] != 0 or borders[-1] != starts.size:
        return f"its samples do not end at piece {starts.size}"
    for part in stretches(starts.size, everything=everything):
        begin, length, document = starts[part], lengths[part].astype(np.int64), documents[part]
        is_bad = (length < 1) | (length > seq_len) | (begin < 0) | (begin > num_tokens - length)
        if (bad := _first(is_bad | (document < 0) | (document >= num_documents))) is not None:
            return (
                f"piece {part.start + bad} has {length[bad]} tokens from {begin[bad]} on, of document {document[bad]}"
            )
    for part in stretches(borders.size - 1, everything=everything):
        edges = borders[part.start : part.stop + 1]
        if (bad := _first((np.diff(edges) < 1) | (edges[:-1] < 0) | (edges[1:] > starts.size))) is not None:
            return f"sample {part.start + bad} has pieces {edges[bad]} to {edges[bad + 1]}"
        held = np.add.reduceat(lengths[edges[0] : edges[-1]], edges[:-1] - edges[0], dtype=np.int64)
        if (bad := _first(held > seq_len)) is not None:
            return f"sample {part.start + bad} has {held[bad]} tokens, {seq_len} at most expected"
    if everything and (found := int(lengths.sum(dtype=np.int64))) != num_held:
        return f"its pieces have {found} tokens of {num_held}"
    return ""


def _first(mask: np.ndarray) -> int | None:
    """The first place where a mask is set."""
    place = int(mask.argmax()) if mask.size else 0
    return place if mask.size and mask[place] else None
