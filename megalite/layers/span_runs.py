"""Spans of keys as kernels take them: documents of one size at once, tiny ones side by side as if they were one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megalite.parallel.context import KeySpan


@dataclass(frozen=True)
class SpanRun:
    """Spans that stand side by side: whole documents of one size, tiny ones of any, or one that is not whole."""

    queries: slice
    """Of the rank's own tokens."""
    keys: slice
    """Of the whole stream."""
    num_queries: int
    """Of each."""
    num_keys: int
    count: int
    lengths: tuple[int, ...] = ()
    """Of tiny documents that are made as one, which has all of their tokens."""

    @property
    def are_whole(self) -> bool:
        return self.num_queries == self.num_keys


def runs_of(spans: Sequence[KeySpan], most_joint: int) -> Iterator[SpanRun]:
    """Spans of one size that stand side by side, taken together, and then tiny documents of any."""
    for _, same in itertools.groupby(_runs_of_one_size(spans), _Joint(most_joint)):
        first, *others = same
        if not others:
            yield first
            continue
        lengths = tuple(run.num_keys for run in (first, *others) for _ in range(run.count))
        last, total = others[-1], sum(lengths)
        queries, keys = slice(first.queries.start, last.queries.stop), slice(first.keys.start, last.keys.stop)
        yield SpanRun(queries, keys, total, total, 1, lengths)


def _runs_of_one_size(spans: Sequence[KeySpan]) -> Iterator[SpanRun]:
    for _, same in itertools.groupby(spans, _Grouped()):
        first, *others = same
        count = 1 + len(others)
        queries = slice(first.query, first.query + count * first.num_queries)
        keys = slice(first.key, first.key + count * first.num_keys)
        yield SpanRun(queries, keys, first.num_queries, first.num_keys, count)


class _Joint:
    """The number of the document that a run is made part of."""

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._former: SpanRun | None = None
        self._number = self._num_tokens = 0

    def __call__(self, run: SpanRun) -> int:
        former, self._former = self._former, run
        self._num_tokens += run.count * run.num_keys
        follows = former is not None and former.are_whole and former.keys.stop == run.keys.start
        if not (run.are_whole and follows and self._num_tokens <= self._most_tokens):
            self._number, self._num_tokens = self._number + 1, run.count * run.num_keys
        return self._number


class _Grouped:
    """The number of a span's run: whole documents of one length that follow one another are in one."""

    def __init__(self) -> None:
        self._former: KeySpan | None = None
        self._number = 0

    def __call__(self, span: KeySpan) -> int:
        former, self._former = self._former, span
        is_whole = span.num_queries == span.num_keys
        follows = former is not None and former[1::2] == span[1::2] and former.key + former.num_keys == span.key
        self._number += not (is_whole and follows)
        return self._number
