"""BPE of one word: join the best pair of neighbours, the leftmost of equals, until none can be joined.

    symbols   h  e  l  l  o         ids; ~place for a character without a piece, which nothing joins
    joints     he el ll lo          rank << 32 | id of each pair together, NONE where there is no such piece

    short words   look through all joints for the best each time: most words, and faster than anything clever
    long words    a heap of rank << 32 | position; symbols linked both ways, as joining two leaves the right one GONE

All three lie in the room that the caller gives.

A pair in the heap may have changed since it was put there. Symbols only grow, so it is still what it was if its symbol
is alive and its rank is that of the pair which stands there now.
"""

from __future__ import annotations

import numpy as np

from megalite.kernel import bare_kernel
from megalite.tokenizer.encoders.utf8 import char_size, code_point
from megalite.tokenizer.encoders.vocabulary import NO_PIECE, VocabularyArrays, find

SHORT = 48
"""Symbols; beyond, looking through all of them takes longer than the heap."""

NONE = 2**62
"""A joint behind all others."""

GONE = -(2**62)
"""A symbol that was joined to the one on its left."""

LOW_32 = 0xFFFFFFFF

BPE_ROOM = 6
"""Numbers of room for each byte of a word: symbols, their neighbours on both sides, and a heap that holds three pairs
a symbol at most, as every join adds two."""


@bare_kernel
def encode_bpe(
    buffer: np.ndarray, start: int, stop: int, pieces: VocabularyArrays, room: np.ndarray, out: np.ndarray, at: int
) -> int:
    """Encode bytes start..stop-1 into out[at:], from characters up.

    Args:
        room: int64 [BPE_ROOM * bytes], to work in.

    Returns:
        The place behind the last id.
    """
    char_ids, byte_ids = pieces.char_ids, pieces.byte_ids
    size, place = 0, start
    while place < stop:
        char = code_point(buffer, place)
        id = char_ids[char] if char < char_ids.size else NO_PIECE
        room[size] = ~place if id == NO_PIECE else id
        size += 1
        place += char_size(buffer[place])
    for number in range(_join(room, size, pieces.merges)):
        symbol = room[number]
        if symbol >= 0:
            out[at] = symbol
            at += 1
        else:
            for place in range(~symbol, ~symbol + char_size(buffer[~symbol])):
                out[at] = byte_ids[buffer[place]]
                at += 1
    return at


@bare_kernel
def encode_byte_bpe(
    buffer: np.ndarray, start: int, stop: int, pieces: VocabularyArrays, room: np.ndarray, out: np.ndarray, at: int
) -> int:
    """`encode_bpe` from bytes up: none of them is without a piece."""
    byte_ids = pieces.byte_ids
    for place in range(start, stop):
        room[place - start] = byte_ids[buffer[place]]
    num_ids = _join(room, stop - start, pieces.merges)
    for number in range(num_ids):
        out[at + number] = room[number]
    return at + num_ids


@bare_kernel
def _join(room: np.ndarray, size: int, merges: np.ndarray) -> int:
    """Join the first `size` numbers of the room, symbols, in place; how many are left."""
    symbols, rest = room[:size], room[size:]
    return _join_short(symbols, rest, size, merges) if size <= SHORT else _join_long(symbols, rest, size, merges)


@bare_kernel
def _joint(left: int, right: int, merges: np.ndarray) -> int:
    """rank << 32 | id of two symbols together, or NONE."""
    if left < 0 or right < 0:
        return NONE
    joint = find(merges, left << 32 | right)
    return joint if joint >= 0 else NONE


@bare_kernel
def _join_short(symbols: np.ndarray, joints: np.ndarray, size: int, merges: np.ndarray) -> int:
    for place in range(size - 1):
        joints[place] = _joint(symbols[place], symbols[place + 1], merges)
    while size > 1:
        best = 0
        for place in range(1, size - 1):
            if joints[place] >> 32 < joints[best] >> 32:
                best = place
        if joints[best] == NONE:
            break
        symbols[best] = joints[best] & LOW_32
        size -= 1
        for place in range(best + 1, size):
            symbols[place] = symbols[place + 1]
            joints[place] = joints[place + 1]
        if best > 0:
            joints[best - 1] = _joint(symbols[best - 1], symbols[best], merges)
        if best < size - 1:
            joints[best] = _joint(symbols[best], symbols[best + 1], merges)
    return size


@bare_kernel
def _join_long(symbols: np.ndarray, room: np.ndarray, size: int, merges: np.ndarray) -> int:
    following, preceding, waiting = room[:size], room[size : 2 * size], room[2 * size :]
    for place in range(size):
        following[place], preceding[place] = place + 1, place - 1
    num_waiting = 0
    for place in range(size - 1):
        num_waiting = _wait(waiting, num_waiting, symbols, place, place + 1, merges)
    while num_waiting:
        key, num_waiting = _pop(waiting, num_waiting)
        place = key & LOW_32
        right = following[place]
        if symbols[place] == GONE or right == size:
            continue
        joint = _joint(symbols[place], symbols[right], merges)
        if joint == NONE or joint >> 32 != key >> 32:
            continue
        symbols[place] = joint & LOW_32
        symbols[right] = GONE
        following[place] = following[right]
        if following[place] < size:
            preceding[following[place]] = place
            num_waiting = _wait(waiting, num_waiting, symbols, place, following[place], merges)
        if preceding[place] >= 0:
            num_waiting = _wait(waiting, num_waiting, symbols, preceding[place], place, merges)
    left = 0
    for place in range(size):
        if symbols[place] != GONE:
            symbols[left] = symbols[place]
            left += 1
    return left


@bare_kernel
def _wait(waiting: np.ndarray, size: int, symbols: np.ndarray, left: int, right: int, merges: np.ndarray) -> int:
    """Put a pair on the heap if it can be joined; the new size."""
    joint = _joint(symbols[left], symbols[right], merges)
    if joint == NONE:
        return size
    key = (joint >> 32) << 32 | left
    place = size
    while place > 0 and waiting[(place - 1) >> 1] > key:
        waiting[place] = waiting[(place - 1) >> 1]
        place = (place - 1) >> 1
    waiting[place] = key
    return size + 1


@bare_kernel
def _pop(waiting: np.ndarray, size: int) -> tuple[int, int]:
    """Take the smallest key off the heap; it and the new size."""
    smallest = waiting[0]
    size -= 1
    key = waiting[size]
    place, child = 0, 1
    while child < size:
        if child + 1 < size and waiting[child + 1] < waiting[child]:
            child += 1
        if waiting[child] >= key:
            break
        waiting[place] = waiting[child]
        place = child
        child = 2 * place + 1
    waiting[place] = key
    return smallest, size
