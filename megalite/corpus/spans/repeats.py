"""Which windows of a partition stood earlier: the comparison, byte for byte, inside each group of runs.

    runs of a partition --drop those alone with their key--> sort by key --> groups --fetch the bytes--> compare

    group of key 12     run at  1,000   t h e _ q u i c k _ b r       windows new: remembered
    (corpus order)      run at 73,512   t h e _ q u i c k _ b r       every window found: a repeated passage
                        run at 90,008   t h e _ q u i c k l y         the first ones found, the others new

What counts as a repeat, exactly: a window is repeated when an equal window *ended* before it begins. In a line of 300
dashes the windows at 1, 2, ... equal the first but overlap it; the first min_bytes dashes stay, the rest is a repeat. A
byte is repeated when any window that holds it is. The first occurrence of a window is never a repeat by itself, though
single bytes of it may be repeated as part of another window.

Imports numba at import; import it where the work begins.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from megalite.corpus.spans.windows import LONGEST_RUN, doubled, hash_of, mixed, power, rolled
from megalite.kernel import kernel

CopyBytes = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], None]
"""Copies the text of windows: (places int64, lengths int64, buffer uint8, where in the buffer int64)."""

PASSAGE = np.dtype((np.int64, 2))
"""First place of a passage, and the place behind its last."""

NOT_FOUND = -2
"""A place that no window has, nor the byte before one."""


def repeated_passages(runs: np.ndarray, min_bytes: int, copy_bytes: CopyBytes) -> np.ndarray:
    """Passages that stood earlier.

    Args:
        runs: RUN [runs]: every run of the corpus whose key lies in this partition, in the order of the corpus.
        min_bytes: bytes in a window.
        copy_bytes: fetches the bytes of runs.

    Returns:
        PASSAGE [n], int64 [n, 2], in the count of the runs, in no order. They may overlap, here and with those of other
        partitions.
    """
    candidates = runs[_may_repeat(np.ascontiguousarray(runs["key"]), np.ascontiguousarray(runs["count"]), min_bytes)]
    candidates = candidates[np.argsort(candidates["key"], kind="stable")]
    keys = candidates["key"]
    alone = np.ones(keys.size, bool)
    alone[1:] &= keys[1:] != keys[:-1]
    alone[:-1] &= keys[1:] != keys[:-1]
    candidates = candidates[~alone | (candidates["count"] > min_bytes)]
    lengths = candidates["count"].astype(np.int64) + (min_bytes - 1)
    borders = np.zeros(lengths.size + 1, np.int64)
    np.cumsum(lengths, out=borders[1:])
    buffer = np.empty(borders[-1], np.uint8)
    firsts = np.ascontiguousarray(candidates["first"])
    copy_bytes(firsts, lengths, buffer, borders[:-1])
    return _compare(buffer, borders, firsts, np.ascontiguousarray(candidates["key"]), min_bytes)


def spans_of_passages(passages: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Passages of a row of texts as merged spans.

    Args:
        passages: PASSAGE [n], in any order; places count bytes of all the texts, and none crosses a border.
        offsets: int64 [texts + 1], growing from 0: where each text begins.

    Returns:
        int64 [n, 3]: text, first byte, byte behind the last; sorted, none touching another of the same text.
    """
    order = np.argsort(passages[:, 0])
    return _merge(passages[order, 0], passages[order, 1], offsets)


@kernel
def _merge(starts: np.ndarray, ends: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Join the passages, which are sorted, in place; then say which text each lies in."""
    num_spans, text = 0, 0
    for row in range(starts.size):
        if num_spans > 0 and starts[row] <= ends[num_spans - 1] and starts[row] < offsets[text + 1]:
            ends[num_spans - 1] = max(ends[num_spans - 1], ends[row])
        else:
            while starts[row] >= offsets[text + 1]:
                text += 1
            starts[num_spans], ends[num_spans] = starts[row], ends[row]
            num_spans += 1
    spans = np.empty((num_spans, 3), np.int64)
    text = 0
    for row in range(num_spans):
        while starts[row] >= offsets[text + 1]:
            text += 1
        spans[row, 0], spans[row, 1], spans[row, 2] = text, starts[row] - offsets[text], ends[row] - offsets[text]
    return spans


@kernel
def _may_repeat(keys: np.ndarray, counts: np.ndarray, min_bytes: int) -> np.ndarray:
    """Drop nearly all runs that are alone with their key, without sorting: two sets of bits say which keys (or others
    with the same 24 bits or so) were met once and twice. A run longer than a window may repeat within itself."""
    num_bits = 1024
    while num_bits < 16 * keys.size:
        num_bits *= 2
    once, twice = np.zeros(num_bits // 8, np.uint8), np.zeros(num_bits // 8, np.uint8)
    for key in keys:
        bit = np.int64(mixed(key) & np.uint64(num_bits - 1))
        flag = np.uint8(1 << (bit & 7))
        twice[bit >> 3] |= once[bit >> 3] & flag
        once[bit >> 3] |= flag
    may = np.empty(keys.size, np.bool_)
    for run in range(keys.size):
        bit = np.int64(mixed(keys[run]) & np.uint64(num_bits - 1))
        may[run] = (twice[bit >> 3] >> (bit & 7)) & 1 or counts[run] > min_bytes
    return may


@kernel
def _compare(
    buffer: np.ndarray, borders: np.ndarray, firsts: np.ndarray, keys: np.ndarray, min_bytes: int
) -> np.ndarray:
    """Compare the windows of each group; between two runs there is time to make room.

    Args:
        buffer: uint8, the bytes of the runs end to end.
        borders: int64 [runs + 1], where each begins in it.
        firsts: int64 [runs], the place of each run's first window in the corpus; grows within a group.
        keys: uint64 [runs], sorted.
        min_bytes: bytes in a window.

    Returns:
        int64 [n, 2]: repeated passages.
    """
    hashes = np.empty(4 * LONGEST_RUN, np.uint64)
    places = np.empty(hashes.size, np.int64)
    owners = np.full(hashes.size, -1, np.int64)
    starts, ends = np.empty(LONGEST_RUN, np.int64), np.empty(LONGEST_RUN, np.int64)
    group, num_used, num_passages = 0, 0, 0
    for run in range(firsts.size):
        if keys[run] != keys[group]:
            group, num_used = run, 0
        most = borders[run + 1] - borders[run]
        while 2 * (num_used + most) > owners.size:
            hashes, places, owners = _grown(hashes, places, owners, group)
        while num_passages + most > starts.size:
            starts, ends = doubled(starts), doubled(ends)
        table = hashes, places, owners
        num_new, num_passages = _compare_run(
            buffer, borders, firsts, min_bytes, table, (group, run), (starts, ends), num_passages
        )
        num_used += num_new
    return np.stack((starts[:num_passages], ends[:num_passages]), axis=1)


@kernel
def _compare_run(
    buffer: np.ndarray,
    borders: np.ndarray,
    firsts: np.ndarray,
    min_bytes: int,
    table: tuple[np.ndarray, np.ndarray, np.ndarray],
    group_and_run: tuple[int, int],
    passages: tuple[np.ndarray, np.ndarray],
    num_passages: int,
) -> tuple[int, int]:
    """Look up the windows of a run among those of its group before it, and add those that are new.

    The table holds, in slots, the hash of a window, its place in the buffer, and the run it lies in; a slot whose run
    comes before the group is free. Two guesses save most hashes, since copies are mostly longer than a window: a run
    begins like the one before it in its group, and a window behind one that was found is found behind that.

    Returns:
        How many windows were added, and how many passages there are now.
    """
    hashes, places, owners = table
    group, run = group_and_run
    starts, ends = passages
    shift, weight = firsts[run] - borders[run], power(min_bytes)
    twin, twin_end = np.int64(NOT_FOUND), np.int64(0)  # where the window before was found, and where that run ends
    if run > group and firsts[run - 1] + min_bytes <= firsts[run]:
        begin = borders[run - 1]
        if _equal(buffer, begin, borders[run], min_bytes):
            twin, twin_end = begin - 1, borders[run]
    value, hashed = np.uint64(0), np.int64(-2)
    num_new, was_repeated = 0, False
    for window in range(borders[run], borders[run + 1] - min_bytes + 1):
        last = window + min_bytes - 1
        if twin != NOT_FOUND and twin + min_bytes < twin_end and buffer[twin + min_bytes] == buffer[last]:
            twin += 1
        else:
            if hashed == window - 1:
                value = rolled(value, buffer[window - 1], buffer[last], weight)
            else:
                value = hash_of(buffer, window, min_bytes)
            hashed, twin = window, np.int64(NOT_FOUND)
            slot = _find(hashes, places, owners, group, value, buffer, window, min_bytes)
            owner = owners[slot]
            if owner < group:
                hashes[slot], places[slot], owners[slot] = value, window, run
                num_new += 1
            elif places[slot] + firsts[owner] - borders[owner] + min_bytes <= window + shift:
                twin, twin_end = places[slot], borders[owner + 1]
        if twin != NOT_FOUND:
            if not was_repeated:
                starts[num_passages] = window + shift
                num_passages += 1
            ends[num_passages - 1] = last + 1 + shift
        was_repeated = twin != NOT_FOUND
    return num_new, num_passages


@kernel
def _find(
    hashes: np.ndarray,
    places: np.ndarray,
    owners: np.ndarray,
    group: int,
    value: np.uint64,
    buffer: np.ndarray,
    window: int,
    min_bytes: int,
) -> int:
    """The slot that holds a window with the same bytes, or the free one where it belongs."""
    slot = np.int64(mixed(value) & np.uint64(owners.size - 1))
    while owners[slot] >= group:
        if hashes[slot] == value and _equal(buffer, places[slot], window, min_bytes):
            return slot
        slot = (slot + 1) & (owners.size - 1)
    return slot


@kernel
def _equal(buffer: np.ndarray, left: int, right: int, size: int) -> bool:
    byte = 0
    while byte < size and buffer[left + byte] == buffer[right + byte]:
        byte += 1
    return byte == size


@kernel
def _grown(
    hashes: np.ndarray, places: np.ndarray, owners: np.ndarray, group: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The table with twice the slots, holding this group's windows."""
    size = 2 * owners.size
    new_hashes, new_places = np.empty(size, np.uint64), np.empty(size, np.int64)
    new_owners = np.full(size, -1, np.int64)
    for old in range(owners.size):
        if owners[old] >= group:
            slot = np.int64(mixed(hashes[old]) & np.uint64(size - 1))
            while new_owners[slot] >= 0:
                slot = (slot + 1) & (size - 1)
            new_hashes[slot], new_places[slot], new_owners[slot] = hashes[old], places[old], owners[old]
    return new_hashes, new_places, new_owners


@kernel
def copy_ranges(
    source: np.ndarray, starts: np.ndarray, lengths: np.ndarray, target: np.ndarray, places: np.ndarray
) -> None:
    """Copy `lengths[i]` bytes from `source[starts[i]:]` to `target[places[i]:]`, for every i."""
    for row in range(starts.size):
        start, place = starts[row], places[row]
        for byte in range(lengths[row]):
            target[place + byte] = source[start + byte]
