"""The cut of a stream over context-parallel ranks, against a brute force over tokens."""

from __future__ import annotations

import itertools
import random

import pytest

from megalite.parallel import context
from megalite.parallel.context import KeySpan, Stretch, deal, in_a_row, spans_of, whole_documents


def random_borders(total: int, rng: random.Random) -> list[int]:
    """Of documents, some of them repeated at the end."""
    inner = sorted(rng.sample(range(1, total), rng.randrange(0, min(total - 1, 9))))
    return [0, *inner, total, *[total] * rng.randrange(0, 3)]


def tokens_of(stretches: list[Stretch]) -> list[int]:
    return [token for stretch in stretches for token in range(*stretch)]


def seen_by(token: int, borders: list[int], window: int | None) -> set[int]:
    """The keys of a query, by the definition."""
    first = max(border for border in borders if border <= token)
    return {key for key in range(first, token + 1) if window is None or key > token - window}


@pytest.mark.parametrize("window", [None, 1, 4, 7])
def test_every_query_sees_its_keys_and_no_others(window):
    """Spans of random documents, for cuts into one to four ranks, and the work that they say."""
    rng = random.Random(1)
    for _ in range(60):
        ranks = rng.randrange(1, 5)
        total = 2 * ranks * rng.randrange(1, 9)
        borders = random_borders(total, rng)
        hands = rng.choice((deal(borders, ranks, window), in_a_row(total, ranks)))
        assert sorted(itertools.chain(*map(tokens_of, hands))) == list(range(total))
        for hand in hands:
            own = tokens_of(hand)
            assert own == sorted(own)
            assert len(own) == total // ranks
            seen: dict[int, set[int]] = {}
            for span in spans_of(hand, borders):
                for number in range(span.num_queries):
                    last = span.key + span.num_keys - span.num_queries + number
                    first = span.key if window is None else max(span.key, last - window + 1)
                    assert own[span.query + number] == last
                    seen[last] = set(range(first, last + 1))
            assert seen == {token: seen_by(token, borders, window) for token in own}
            assert sum(span.work(window) for span in spans_of(hand, borders)) == sum(map(len, seen.values()))


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_one_document_is_cut_in_zig_zag(ranks):
    """Block r and the r-th from the end: all ranks have as much to do."""
    hands = deal([0, 12 * ranks], ranks)
    for rank, hand in enumerate(hands):
        first, second = range(6 * rank, 6 * rank + 6), range(6 * (2 * ranks - 1 - rank), 6 * (2 * ranks - rank))
        assert tokens_of(hand) == [*first, *second]


def test_work_is_even_where_documents_are_not(monkeypatch):
    """A long document among short ones: more blocks a rank, until none has more than a few percent above the mean."""
    rng = random.Random(2)
    for _ in range(20):
        lengths = [rng.choice((40, 300, 2000, 9000)) for _ in range(30)]
        borders = [0, *itertools.accumulate(lengths)]
        borders[-1] += -borders[-1] % 64
        for ranks in (2, 4):
            shares = []
            for most in (2, 16):
                monkeypatch.setattr(context, "BLOCKS_OF_A_RANK", [n for n in (2, 4, 8, 16) if n <= most])
                work = [sum(span.work() for span in spans_of(hand, borders)) for hand in deal(borders, ranks)]
                shares.append(max(work) * ranks / sum(work))
            assert shares[1] <= shares[0]
            assert shares[1] < 1.08, (lengths, ranks, shares)


def test_work_of_documents():
    """By hand."""
    assert whole_documents([3, 2]) == [KeySpan(0, 3, 0, 3), KeySpan(3, 2, 3, 2)]
    assert [span.work() for span in whole_documents([3, 2])] == [6, 3]
    assert KeySpan(0, 2, 0, 5).work(3) == 6
    assert KeySpan(0, 4, 0, 5).work(3) == 2 + 3 + 3 + 3
