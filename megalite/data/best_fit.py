"""Best-fit-decreasing bin packing of documents into sequences, exactly, in O(documents x log seq_len).

Documents longer than a sequence are cut into pieces of seq_len first; nothing else is ever cut, and nothing is dropped.
Then the pieces go, longest first, into the fullest sequence that still has room (Johnson 1974; for language models
Ding et al. 2024, "Fewer truncations improve language modeling"). Free space is a small integer, so the sequences are
kept in one stack for each amount of it, and a tree of booleans over the amounts finds the smallest that suffices.

Needs numba at import; import it where packing begins.
"""

from __future__ import annotations

import numpy as np

from megalite.kernel import kernel


@kernel
def cut_documents(lengths: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut documents into pieces of at most seq_len tokens, in stream order.

    Args:
        lengths: int64 [documents]; empty documents yield no piece.
        seq_len: tokens in a sequence.

    Returns:
        Of each piece: its start in the stream (int64), its length (int32), its document (int64).
    """
    num_pieces = 0
    for length in lengths:
        num_pieces += (length + seq_len - 1) // seq_len
    starts = np.empty(num_pieces, np.int64)
    sizes = np.empty(num_pieces, np.int32)
    documents = np.empty(num_pieces, np.int64)
    piece, start = 0, 0
    for document in range(lengths.size):
        left = lengths[document]
        while left > 0:
            size = min(left, seq_len)
            starts[piece], sizes[piece], documents[piece] = start, size, document
            piece, start, left = piece + 1, start + size, left - size
    return starts, sizes, documents


@kernel
def assign_pieces(sizes: np.ndarray, seq_len: int) -> tuple[np.ndarray, int]:
    """Give each piece a sequence by best-fit-decreasing.

    Args:
        sizes: int32 [pieces], each in [1, seq_len].
        seq_len: tokens in a sequence.

    Returns:
        The sequence of each piece (int64), numbered by the first piece each holds, and the number of sequences.
    """
    order = _longest_first(sizes, seq_len)
    num_leaves = 1
    while num_leaves < seq_len + 1:
        num_leaves *= 2
    occupied = np.zeros(2 * num_leaves, np.bool_)  # leaf num_leaves + f: some sequence has f tokens free
    newest = np.full(seq_len + 1, -1, np.int64)  # top of the stack of sequences with f tokens free
    below = np.empty(sizes.size, np.int64)  # the next sequence in a stack
    sequence_of = np.empty(sizes.size, np.int64)
    num_sequences = 0
    for piece in order:
        size = sizes[piece]
        free = _smallest_occupied(occupied, num_leaves, size)
        if free < 0:
            sequence, free = num_sequences, seq_len
            num_sequences += 1
        else:
            sequence = newest[free]
            newest[free] = below[sequence]
            if newest[free] < 0:
                _set_leaf(occupied, num_leaves + free, False)
        sequence_of[piece] = sequence
        free -= size
        if free > 0:
            if newest[free] < 0:
                _set_leaf(occupied, num_leaves + free, True)
            below[sequence] = newest[free]
            newest[free] = sequence
    return _number_by_first_piece(sequence_of, num_sequences), num_sequences


@kernel
def group_pieces(sequence_of: np.ndarray, num_sequences: int) -> tuple[np.ndarray, np.ndarray]:
    """Sort pieces by sequence, keeping stream order inside each.

    Returns:
        The piece indices in that order, and the int64 [num_sequences + 1] borders of the sequences in it.
    """
    borders = np.zeros(num_sequences + 1, np.int64)
    for sequence in sequence_of:
        borders[sequence + 1] += 1
    borders = np.cumsum(borders)
    place = borders[:-1].copy()
    order = np.empty(sequence_of.size, np.int64)
    for piece in range(sequence_of.size):
        order[place[sequence_of[piece]]] = piece
        place[sequence_of[piece]] += 1
    return order, borders


@kernel
def _longest_first(sizes: np.ndarray, seq_len: int) -> np.ndarray:
    """Counting sort, stable, descending."""
    place = np.zeros(seq_len + 1, np.int64)
    for size in sizes:
        place[seq_len - size] += 1
    place = np.cumsum(place) - place
    order = np.empty(sizes.size, np.int64)
    for piece in range(sizes.size):
        slot = seq_len - sizes[piece]
        order[place[slot]] = piece
        place[slot] += 1
    return order


@kernel
def _smallest_occupied(occupied: np.ndarray, num_leaves: int, at_least: int) -> int:
    """The smallest occupied amount >= at_least, or -1: climb until a right neighbour is occupied, then descend."""
    node = num_leaves + at_least
    while not occupied[node]:
        while node & 1:
            node >>= 1
        if node == 0:
            return -1
        node += 1
    while node < num_leaves:
        node *= 2
        if not occupied[node]:
            node += 1
    return node - num_leaves


@kernel
def _set_leaf(occupied: np.ndarray, node: int, value: bool) -> None:
    """Set a leaf, then make each parent the `or` of its children."""
    occupied[node] = value
    node >>= 1
    while node > 0:
        occupied[node] = occupied[2 * node] or occupied[2 * node + 1]
        node >>= 1


@kernel
def _number_by_first_piece(sequence_of: np.ndarray, num_sequences: int) -> np.ndarray:
    """Renumber sequences in the order in which the stream first meets them, so that neighbours lie close on disk."""
    number = np.full(num_sequences, -1, np.int64)
    renumbered = np.empty_like(sequence_of)
    met = 0
    for piece in range(sequence_of.size):
        sequence = sequence_of[piece]
        if number[sequence] < 0:
            number[sequence] = met
            met += 1
        renumbered[piece] = number[sequence]
    return renumbered
