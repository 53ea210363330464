"""Repeated passages: exactly those of a search by hand, whatever the partitions, shards and workers."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.corpus.spans.settings import SubstringConfig
from megalite.corpus.spans.substring import find_repeats, find_repeats_in_shards, load_spans
from megalite.progress import NoProgress
from megalite.stations.runners import LocalPool
from megalite.texts import Texts
from tests.corpus.spans.kit import ON_THE_SPOT, as_tuples, spans_of_cover, write_shards
from tests.kit.data import prose

MIN_BYTES = 8

LIMIT_BYTES_PER_BYTE = 2.0
"""Memory that the search may need for each byte of text, the text itself not counted."""


def search_by_hand(texts: list[str], min_bytes: int) -> list[tuple[int, int, int]]:
    """The definition, word for word: a window is repeated when its bytes stand in an earlier text, or in the same one
    before the window begins."""
    encoded = [text.encode() for text in texts]
    covers = []
    for number, text in enumerate(encoded):
        cover = np.zeros(len(text), bool)
        for start in range(len(text) - min_bytes + 1):
            window = text[start : start + min_bytes]
            if window in text[:start] or any(window in earlier for earlier in encoded[:number]):
                cover[start : start + min_bytes] = True
        covers.append(cover)
    return spans_of_cover(covers)


pieces = st.sampled_from(["a", "b", "ab", "aab", "é", "日", "a" * 15, "ab" * 9, "abbaabab", "b" * 8 + "a", "日本語"])
small_texts = st.lists(st.lists(pieces, max_size=14).map("".join), max_size=7)


@settings(max_examples=400, deadline=None)
@given(texts=small_texts, num_partitions=st.sampled_from([1, 2, 7]), min_bytes=st.sampled_from([MIN_BYTES, 9, 13]))
def test_equals_search_by_hand(texts, num_partitions, min_bytes):
    """On texts made to repeat, overlap themselves and share blocks, the spans are those of the definition."""
    config = SubstringConfig(min_bytes=min_bytes, num_partitions=num_partitions)
    assert as_tuples(find_repeats(Texts.of(texts), config)) == search_by_hand(texts, min_bytes)


@settings(max_examples=150, deadline=None)
@given(
    letters=st.lists(st.text("ab", min_size=30, max_size=120), min_size=1, max_size=3),
    copies=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 100), st.integers(0, 60)), max_size=6),
)
def test_copies_of_random_letters(letters, copies):
    """Passages copied to other surroundings, where the first text with a block is often not the one that agrees on."""
    texts = list(letters)
    for source, start, length in copies:
        text = letters[source % len(letters)]
        texts.append("x" + text[start : start + length] + "y" + texts[-1][:20])
    assert as_tuples(find_repeats(Texts.of(texts), SubstringConfig(min_bytes=MIN_BYTES))) == search_by_hand(
        texts, MIN_BYTES
    )


@pytest.mark.parametrize("block_bytes", [1, 3, 40])
def test_keys_do_not_decide(monkeypatch, block_bytes):
    """Whatever windows share a group, down to a handful of groups for all of them, the same passages repeat."""
    texts, config = Texts.of(planted()[0]), SubstringConfig(min_bytes=40)
    expected = as_tuples(find_repeats(texts, config))
    monkeypatch.setattr("megalite.corpus.spans.windows.block_bytes_for", lambda min_bytes: block_bytes)
    assert as_tuples(find_repeats(texts, config)) == expected


def test_first_copy_of_a_long_run_stays():
    """Of 1,000 dashes the first 100 stay; a second line of them is a repeat from its first dash on."""
    spans = find_repeats(Texts.of(["-" * 1000, "x" + "-" * 300]), SubstringConfig(min_bytes=100))
    assert as_tuples(spans) == [(0, 100, 1000), (1, 1, 301)]


def test_long_periodic_text():
    """Runs of windows longer than one entry may be, and a period that does not divide the window."""
    text = "abc" * 4000
    spans = find_repeats(Texts.of([text, "z" + text]), SubstringConfig(min_bytes=100))
    assert as_tuples(spans) == [(0, 102, 12000), (1, 1, 12001)]


def test_short_and_no_texts():
    """Nothing to find is no error."""
    config = SubstringConfig(min_bytes=100)
    for texts in ([], [""], ["short", "short", ""], ["a" * 99] * 3):
        assert find_repeats(Texts.of(texts), config).shape == (0, 3)
    assert as_tuples(find_repeats(Texts.of(["a" * 99 + "b"] * 2), config)) == [(1, 0, 100)]


def test_slice_of_a_larger_buffer():
    """Texts whose first offset is not 0 give the same spans."""
    texts = Texts.of(["dropped " * 20, *planted()[0][:40]])
    part = Texts(texts.buffer, texts.offsets[1:])
    config = SubstringConfig(min_bytes=40)
    assert as_tuples(find_repeats(part, config)) == as_tuples(find_repeats(Texts.of(list(part)), config))


def planted() -> tuple[list[str], list[tuple[int, int, int]]]:
    """Prose with passages of random letters, each in three documents; and where each stands for a later time."""
    rng = random.Random(5)
    texts, places, seen = prose(120, seed=1), [], set()
    passages = ["".join(rng.choices("abcdefghij é", k=rng.randrange(100, 400))) for _ in range(20)]
    holders = [number % 20 for number in range(60)]
    rng.shuffle(holders)
    for number, passage in enumerate(holders):
        before = texts[number][: rng.randrange(len(texts[number]))]
        if passage in seen:
            start = len(before.encode())
            places.append((number, start, start + len(passages[passage].encode())))
        seen.add(passage)
        texts[number] = before + passages[passage] + texts[number][len(before) :]
    return texts, places


def test_planted_passages_are_found():
    """Every later copy of a planted passage lies inside a span, and no first copy's interior does."""
    texts, places = planted()
    spans = as_tuples(find_repeats(Texts.of(texts), SubstringConfig(min_bytes=100)))
    assert len(places) == 40
    for text, start, end in places:
        assert any(text == t and s <= start and end <= e for t, s, e in spans)
    assert len(spans) == len(places)


@pytest.mark.parametrize(("num_shards", "rows", "num_partitions"), [(1, 200, 1), (3, 7, 5), (6, 1, 16)])
def test_shards_equal_memory(tmp_path, num_shards, rows, num_partitions):
    """Files, row groups and partitions do not change the result, nor does an empty shard."""
    texts = planted()[0]
    config = SubstringConfig(min_bytes=40, num_partitions=num_partitions)
    whole = as_tuples(find_repeats(Texts.of(texts), SubstringConfig(min_bytes=40)))
    shards = [*write_shards(tmp_path / "in", texts, num_shards=num_shards, rows=rows)]
    shards += write_shards(tmp_path / "empty", [], num_shards=1)
    reports = find_repeats_in_shards(tmp_path / "out", shards, config, runner=ON_THE_SPOT, progress=NoProgress())
    found, first = [], 0
    for number, report in enumerate(reports):
        found += [(first + text, start, end) for text, start, end in as_tuples(load_spans(tmp_path / "out", number))]
        first += report["documents"]
    assert found == whole
    assert sum(report["bytes"] for report in reports) == Texts.of(texts).num_bytes
    assert sum(report["repeated_bytes"] for report in reports) == sum(end - start for _, start, end in whole)


class Backwards:
    """The last task first."""

    def run(self, folder: Path, phase: str, numbers: Sequence[int]) -> Iterator[int]:
        return ON_THE_SPOT.run(folder, phase, sorted(numbers, reverse=True))


def test_workers_do_not_change_the_result(tmp_path):
    """A pool of processes and another order of the tasks leave the same, also after an interruption."""
    shards = write_shards(tmp_path / "in", planted()[0], num_shards=3)
    config = SubstringConfig(min_bytes=40, num_partitions=3)
    find_repeats_in_shards(tmp_path / "one", shards, config, runner=ON_THE_SPOT, progress=NoProgress())
    with LocalPool(2) as pool:
        find_repeats_in_shards(tmp_path / "two", shards, config, runner=pool, progress=NoProgress())
    find_repeats_in_shards(tmp_path / "three", shards, config, runner=Backwards(), progress=NoProgress())
    for number in range(3):
        for other in ("two", "three"):
            assert np.array_equal(load_spans(tmp_path / "one", number), load_spans(tmp_path / other, number))
    lost = tmp_path / "two" / ".work" / "substring-repeats"
    (lost / "00001.json").unlink()
    (lost / "00001.rows").unlink()
    (tmp_path / "two" / ".work" / "substring-spans" / "00002.json").unlink()
    find_repeats_in_shards(tmp_path / "two", shards, config, runner=ON_THE_SPOT, progress=NoProgress())
    assert np.array_equal(load_spans(tmp_path / "one", 2), load_spans(tmp_path / "two", 2))


MEASURE = """
import pathlib
import numpy as np
from megalite.corpus.spans.settings import SubstringConfig
from megalite.corpus.spans.substring import find_repeats
from megalite.texts import Texts

def memory(name):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

letters = np.random.default_rng(0).integers(97, 123, 20_000_000, np.uint8)
letters[15_000_000:] = letters[:5_000_000]
texts = Texts(letters, np.arange(0, letters.size + 1, 4000))
config = SubstringConfig()
find_repeats(Texts(letters, texts.offsets[:10]), config)  # compiled, or loaded
pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = memory("VmRSS:")
spans = find_repeats(texts, config)
assert (spans[:, 2] - spans[:, 1]).sum() == 5_000_000
print((memory("VmHWM:") - before) / letters.size)
"""


def test_memory():
    """A search with a quarter of the text repeated stays below two bytes for each byte of text."""
    result = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, timeout=120, check=True)
    assert 0.0 < float(result.stdout) < LIMIT_BYTES_PER_BYTE
