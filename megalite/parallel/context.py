"""Which tokens of a stream a context-parallel rank has, and what its queries see: pure arithmetic.

A stream of t tokens is cut into equal blocks, and every rank gets as many. What attention costs a block differs: a
token sees those before it in its document. So blocks are dealt out, the dearest first, each to the rank that has least
to do and room left. For one document and two blocks a rank that gives the zig-zag of ring attention (rank 0 the first
and the last block, rank 1 the second and the last but one); where borders of documents make that uneven, smaller blocks
do better.

Legend: t tokens of a micro-batch's stream, n ranks.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

BLOCKS_OF_A_RANK = (2, 4, 8, 16)
LEAST_BLOCK = 256
"""Tokens of a block where there are more than two a rank: products of few rows are slow."""
EVEN = 1.03
"""A rank that has no more to do than this many times the mean is as good as one that has the mean."""


class Stretch(NamedTuple):
    """Tokens side by side in a stream."""

    start: int
    stop: int


class KeySpan(NamedTuple):
    """Queries side by side in one document, and the keys that the last of them sees."""

    query: int
    """The first, among the rank's own tokens."""
    num_queries: int
    key: int
    """The document's first, in the whole stream."""
    num_keys: int

    def work(self, window: int | None = None) -> int:
        """Pairs of a query and a key that it sees."""
        first, last = self.num_keys - self.num_queries + 1, self.num_keys
        if window is None or window >= last:
            return (first + last) * self.num_queries // 2
        growing = max(0, window - first)
        return (first + first + growing - 1) * growing // 2 + window * (self.num_queries - growing)


def deal(borders: Sequence[int], num_ranks: int, window: int | None = None) -> list[list[Stretch]]:
    """The stretches of each rank: t / num_ranks tokens, in the stream's order.

    Args:
        borders: where each document begins, and t, which 2 x num_ranks divides.
        window: tokens that a query sees, itself included; None for all before it.
    """
    total = borders[-1]
    best, best_share = [], float("inf")
    for number in BLOCKS_OF_A_RANK:
        size, rest = divmod(total, number * num_ranks)
        if rest or (number > BLOCKS_OF_A_RANK[0] and size < LEAST_BLOCK):
            continue
        hands, loads = _deal_blocks(borders, size, num_ranks, window)
        share = max(loads) * num_ranks / sum(loads)
        if share < best_share:
            best, best_share = hands, share
        if share <= EVEN:
            break
    assert best, f"{total} tokens are not cut by 2 x {num_ranks}"
    return best


def in_a_row(total: int, num_ranks: int) -> list[list[Stretch]]:
    """One stretch a rank, in order."""
    size = total // num_ranks
    return [[Stretch(rank * size, (rank + 1) * size)] for rank in range(num_ranks)]


def spans_of(stretches: Sequence[Stretch], borders: Sequence[int]) -> list[KeySpan]:
    """What the queries of a rank see: a span for each document that a stretch touches.

    Args:
        stretches: the rank's, in order.
        borders: where each document begins, and t; repeated or not.
    """
    spans, query = [], 0
    for start, stop in stretches:
        for first, border in _documents_between(borders, start, stop):
            begin, end = max(first, start), min(border, stop)
            spans.append(KeySpan(query, end - begin, first, end - first))
            query += end - begin
    return spans


class PieceSpan(NamedTuple):
    """Queries of one document side by side, and keys of it that another rank has side by side."""

    query: int
    """The first, among the rank's own tokens."""
    num_queries: int
    key: int
    """The first, among the other's."""
    num_keys: int
    before: int
    """The first query's place in the document, counted from the first key; as large as num_keys or larger: all keys are
    seen."""


def spans_of_piece(
    own: Sequence[Stretch], others: Sequence[Stretch], borders: Sequence[int], window: int | None = None
) -> list[PieceSpan]:
    """What the queries of one rank see of another's keys, or of their own.

    Args:
        own: stretches of the queries.
        others: stretches of the keys.
        borders: where each document begins, and t; repeated or not.
        window: keys that no query has within it are left out.
    """
    by_document: dict[int, list[KeySpan]] = {}
    for span in spans_of(others, borders):
        by_document.setdefault(span.key, []).append(span)
    found = []
    for span in spans_of(own, borders):
        first_query = span.num_keys - span.num_queries
        for seen in by_document.get(span.key, ()):
            first_key, last_key = seen.num_keys - seen.num_queries, seen.num_keys - 1
            is_within = window is None or first_query - last_key < window
            if first_key <= first_query and is_within:
                before = first_query - first_key
                found.append(PieceSpan(span.query, span.num_queries, seen.query, seen.num_queries, before))
    return found


def whole_documents(lengths: Sequence[int]) -> list[KeySpan]:
    """The spans of a rank that has all tokens."""
    starts = itertools.accumulate(lengths, initial=0)
    return [KeySpan(start, length, start, length) for start, length in zip(starts, lengths, strict=False)]


def _documents_between(borders: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Begin and end of the documents that have tokens in [start, stop)."""
    number = bisect.bisect_right(borders, start) - 1
    while borders[number] < stop:
        if borders[number + 1] > borders[number]:
            yield borders[number], borders[number + 1]
        number += 1


def _deal_blocks(
    borders: Sequence[int], size: int, num_ranks: int, window: int | None
) -> tuple[list[list[Stretch]], list[int]]:
    """Blocks of one size dealt out, and what each rank has to do."""
    blocks = [Stretch(start, start + size) for start in range(0, borders[-1], size)]
    work = {block: sum(span.work(window) for span in spans_of([block], borders)) for block in blocks}
    hands: list[list[Stretch]] = [[] for _ in range(num_ranks)]
    loads, room = [0] * num_ranks, [len(blocks) // num_ranks] * num_ranks
    for block in sorted(blocks, key=lambda block: -work[block]):
        rank = min((rank for rank in range(num_ranks) if room[rank]), key=lambda rank: (loads[rank], rank))
        hands[rank].append(block)
        loads[rank] += work[block]
        room[rank] -= 1
    return [_joined(sorted(hand)) for hand in hands], loads


def _joined(blocks: Sequence[Stretch]) -> list[Stretch]:
    """Blocks that follow one another as one stretch."""
    stretches: list[Stretch] = []
    for block in blocks:
        if stretches and stretches[-1].stop == block.start:
            stretches[-1] = Stretch(stretches[-1].start, block.stop)
        else:
            stretches.append(block)
    return stretches
