"""Packing: nothing lost, repeated or reordered, only long documents cut, and as tight as the slow plain algorithm."""

from __future__ import annotations

import hashlib
import io
import math
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from rich.console import Console

from megalite.config.schema import SourceConfig
from megalite.data.best_fit import assign_pieces, cut_documents, group_pieces
from megalite.data.indexed import IndexedTokens, IndexedWriter
from megalite.data.layout import (
    BORDERS_FILE,
    DOCUMENTS_FILE,
    LENGTHS_FILE,
    STARTS_FILE,
    ConcatLayout,
    Layout,
    PackedLayout,
)
from megalite.data.pack import pack, times_of
from megalite.data.pack_report import render
from megalite.data.settings import PackConfig, RepeatConfig
from megalite.data.sources import open_source
from megalite.errors import DataError
from megalite.stations.manifest import find_manifest
from tests.data.golden import fixed_documents
from tests.kit.data import all_bytes, random_documents, write_packed_folder, write_pair, write_tokens_folder

LENGTHS = st.lists(st.integers(0, 40), max_size=60)
SEQ_LENS = st.integers(1, 20)


def best_fit_fills(sizes: list[int], seq_len: int) -> list[int]:
    """Fill of each sequence under best-fit-decreasing, by looking at every open sequence for every piece."""
    fills: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [index for index, fill in enumerate(fills) if fill + size <= seq_len]
        if fitting:
            fills[max(fitting, key=lambda index: fills[index])] += size
        else:
            fills.append(size)
    return fills


@given(lengths=LENGTHS, seq_len=SEQ_LENS)
@settings(max_examples=200, deadline=None)
def test_pieces_cover_the_stream(lengths, seq_len):
    """Pieces follow each other without gap; a document that fits is one piece, a longer one as few as can be."""
    starts, sizes, documents = cut_documents(np.array(lengths, np.int64), seq_len)
    assert starts.tolist() == (np.cumsum(sizes) - sizes).tolist()
    assert (sizes >= 1).all()
    assert (sizes <= seq_len).all()
    for document, length in enumerate(lengths):
        own = sizes[documents == document]
        assert own.sum() == length
        assert own.size == -(-length // seq_len)


@given(sizes=st.lists(st.integers(1, 20), max_size=80), slack=st.integers(0, 10))
@settings(max_examples=200, deadline=None)
def test_assignment_equals_plain_best_fit_decreasing(sizes, slack):
    """The same fills as brute force; ties between equally full sequences cannot change them."""
    seq_len = max(sizes, default=1) + slack
    sequence_of, num_sequences = assign_pieces(np.array(sizes, np.int32), seq_len)
    fills = np.bincount(sequence_of, weights=sizes, minlength=num_sequences).astype(int)
    assert sorted(fills.tolist()) == sorted(best_fit_fills(sizes, seq_len))


@given(sequences=st.lists(st.integers(0, 9), max_size=50))
@settings(max_examples=100, deadline=None)
def test_groups_hold_each_piece_once_in_stream_order(sequences):
    """Grouping is a stable sort by sequence."""
    order, borders = group_pieces(np.array(sequences, np.int64), 10)
    assert order.tolist() == sorted(range(len(sequences)), key=lambda piece: sequences[piece])
    assert borders.tolist() == [sum(each < sequence for each in sequences) for sequence in range(11)]


@pytest.mark.parametrize("method", ["best_fit", "concat"])
def test_every_token_of_the_stream_is_in_one_sample(tmp_path, method):
    """Both methods: all positions once, pieces inside their documents, counts as written in the manifest."""
    documents = random_documents(200, longest=50)
    folder = write_packed_folder(tmp_path / "packed", documents, seq_len=16, method=method)
    tokens = IndexedTokens(tmp_path / "packed-tokens" / "tokens")
    layout = PackedLayout(folder) if method == "best_fit" else ConcatLayout(tokens, 16)
    starts = np.concatenate([[0], np.cumsum([document.size for document in documents])])
    positions = []
    for sample in range(layout.num_samples):
        pieces = layout.pieces(sample)
        assert 1 <= pieces.lengths.sum() <= 16
        for start, length, document in zip(*pieces, strict=True):
            assert starts[document] <= start < start + length <= starts[document + 1]
            positions += range(start, start + length)
    assert sorted(positions) == list(range(starts[-1]))
    counts = find_manifest(folder).counts
    assert counts["samples"] == layout.num_samples
    assert counts["tokens"] == starts[-1]
    assert counts["padding_percent"] == pytest.approx(100 * (1 - starts[-1] / (16 * layout.num_samples)), abs=1e-3)


def test_counts_of_documents_cut(tmp_path):
    """Sequence 8: a document longer than any pack is cut and counted; concat also cuts where its border falls."""
    documents = [np.full(size, 5) for size in (20, 5, 8, 4, 3)]
    tokens = write_tokens_folder(tmp_path / "tokens", documents)
    best_fit = pack(tokens, tmp_path / "best", PackConfig(seq_len=8)).manifest.counts
    assert (best_fit["documents_split"], best_fit["documents_longer_than_seq_len"], best_fit["samples"]) == (1, 1, 5)
    concat = pack(tokens, tmp_path / "concat", PackConfig(seq_len=8, method="concat")).manifest.counts
    assert (concat["documents_split"], concat["documents_longer_than_seq_len"], concat["samples"]) == (3, 1, 5)


def test_packs_a_bare_megatron_pair(tmp_path):
    """Tokens made elsewhere need no manifest."""
    prefix = write_pair(tmp_path / "pair", random_documents(20))
    for given_path in (prefix, tmp_path / "pair.bin", tmp_path / "pair.idx"):
        result = pack(given_path, tmp_path / "packed", PackConfig(seq_len=16))
    assert result.reused


@pytest.mark.parametrize("exists", [True, False])
def test_nothing_to_pack(tmp_path, exists):
    """Missing and empty tokens are refused by name."""
    if exists:
        write_tokens_folder(tmp_path / "tokens", [])
    with pytest.raises(DataError, match="empty: there is no token" if exists else "no such folder"):
        pack(tmp_path / "tokens", tmp_path / "packed", PackConfig(seq_len=8))


def test_padding_is_small_on_natural_lengths():
    """Log-normal document lengths, as text has them: at most 0.02 % padding at 2048 tokens."""
    lengths = np.random.default_rng(0).lognormal(6.3, 1.4, 100_000).astype(np.int64) + 1
    _, sizes, _ = cut_documents(lengths, 2048)
    _, num_sequences = assign_pieces(sizes, 2048)
    assert 1 - lengths.sum() / (num_sequences * 2048) < 2e-4


PIECE_FILES = (BORDERS_FILE, DOCUMENTS_FILE, LENGTHS_FILE, STARTS_FILE)


def all_pieces(layout: Layout) -> list[list[tuple[int, int, int]]]:
    """(start, length, document) of every piece of every sample."""
    return [
        list(zip(*(column.tolist() for column in layout.pieces(sample)), strict=True))
        for sample in range(layout.num_samples)
    ]


def assert_tokens_are_kept(samples: list[list[tuple[int, int, int]]], lengths: list[int], seq_len: int) -> None:
    """Put back together in the order of samples, the pieces of each document are the document, cut where it must be."""
    starts = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    found: dict[int, list[tuple[int, int]]] = {}
    for pieces in samples:
        assert 1 <= sum(length for _, length, _ in pieces) <= seq_len
        for start, length, document in pieces:
            found.setdefault(document, []).append((start, length))
    for document, length in enumerate(lengths):
        places = [place for start, size in sorted(found.get(document, [])) for place in range(start, start + size)]
        assert places == list(range(starts[document], starts[document] + length))
        assert len(found.get(document, [])) == -(-length // seq_len)


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=50).filter(any),
    seq_len=SEQ_LENS,
    window=st.none() | st.integers(1, 60),
)
@settings(max_examples=60, deadline=None)
def test_packing_keeps_every_token_of_every_document(tmp_path_factory, lengths, seq_len, window):
    """Nothing lost, repeated or reordered inside a document, with any window, and no sequence mixes windows."""
    folder = tmp_path_factory.mktemp("pack")
    prefix = write_pair(folder / "pair", [np.full(length, 5) for length in lengths])
    pack(prefix, folder / "packed", PackConfig(seq_len=seq_len, window_documents=window))
    samples = all_pieces(PackedLayout(folder / "packed"))
    assert_tokens_are_kept(samples, lengths, seq_len)
    if window is not None:
        windows = [{document // window for _, _, document in pieces} for pieces in samples]
        assert all(len(each) == 1 for each in windows)
        numbers = [number for each in windows for number in each]
        assert numbers == sorted(numbers)


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=50).filter(any),
    seq_len=SEQ_LENS,
    method=st.sampled_from(["best_fit", "concat"]),
    walk=st.sampled_from([1, 3, 1 << 20]),
)
@settings(max_examples=60, deadline=None)
def test_the_report_counts_what_is_there(tmp_path_factory, lengths, seq_len, method, walk):
    """Every number against counting pieces one by one, however the counting is cut into stretches."""
    folder = tmp_path_factory.mktemp("pack")
    prefix = write_pair(folder / "pair", [np.full(length, 5) for length in lengths])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megalite.data.pack.WALK_DOCUMENTS", walk)
        counts = pack(prefix, folder / "packed", PackConfig(seq_len=seq_len, method=method)).manifest.counts
    layout = ConcatLayout(IndexedTokens(prefix), seq_len) if method == "concat" else PackedLayout(folder / "packed")
    samples = all_pieces(layout)
    filled = [sum(length for _, length, _ in pieces) for pieces in samples]
    owners = [document for pieces in samples for _, _, document in pieces]
    report = counts["report"]
    assert counts["samples"] == len(samples)
    assert counts["documents_split"] == sum(owners.count(document) > 1 for document in set(owners))
    assert counts["documents_longer_than_seq_len"] == sum(length > seq_len for length in lengths)
    assert report["padding_tokens"] == len(samples) * seq_len - sum(lengths)
    assert counts["padding_percent"] == round(100 * (1 - sum(filled) / (len(samples) * seq_len)), 4)
    assert report["sequences_above_least"] == len(samples) - -(-sum(lengths) // seq_len)
    assert report["cuts"] == len(owners) - len(set(owners))
    assert report["most_documents_in_a_sequence"] == max(map(len, samples))
    assert report["documents_per_sequence"] == round(len(owners) / len(samples), 2)
    ranges = {"1": (1, 1), "2": (2, 2), "3-4": (3, 4), "5-8": (5, 8), "9-16": (9, 16), "17-32": (17, 32)}
    expected = {name: sum(a <= len(pieces) <= b for pieces in samples) for name, (a, b) in ranges.items()}
    assert report["sequences_by_documents"] == {name: count for name, count in expected.items() if count}
    masked = 0
    for pieces, tokens in zip(samples, filled, strict=True):
        for span in [*(length for _, length, _ in pieces), seq_len - tokens]:
            masked += sum(range(span + 1))
    assert report["attention_percent"] == round(100 * masked / (len(samples) * sum(range(seq_len + 1))), 2)


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=50).filter(any),
    seq_len=SEQ_LENS,
    window=st.none() | st.integers(1, 60),
    repeats=st.dictionaries(st.integers(1, 40), st.sampled_from([1.0, 1.5, 2.0, 3.25]), min_size=1, max_size=3),
)
@settings(max_examples=60, deadline=None)
def test_long_documents_come_as_often_as_asked(tmp_path_factory, lengths, seq_len, window, repeats):
    """Every document whole, each as often as the largest border below its length says: a part of a time for as many,
    whatever the windows. The folder is one to train on, and is verified as one."""
    folder = tmp_path_factory.mktemp("pack")
    prefix = write_pair(folder / "pair", [np.full(length, 5) for length in lengths])
    given = [{"from_tokens": border, "times": times} for border, times in repeats.items()]
    config = PackConfig(seq_len=seq_len, window_documents=window, repeats=given)
    counts = pack(prefix, folder / "packed", config).manifest.counts
    found = Counter(piece for pieces in all_pieces(PackedLayout(folder / "packed")) for piece in pieces)
    starts = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    expected: Counter[tuple[int, int, int]] = Counter()
    for document, length in enumerate(lengths):
        asked = next((repeats[border] for border in sorted(repeats, reverse=True) if border <= length), 1.0)
        share = document * 0x9E3779B97F4A7C15 % 2**64 / 2**64
        times = math.floor(asked) + (share < asked % 1)
        for start in range(0, length, seq_len):
            expected[starts[document] + start, min(seq_len, length - start), document] += times
    assert found == expected
    assert counts["tokens"] == sum(lengths)
    assert counts["tokens_with_repeats"] == sum(size * times for (_, size, _), times in expected.items())
    assert counts["report"]["cuts"] == sum(t for (start, _, doc), t in expected.items() if start != starts[doc])
    opened = open_source(SourceConfig(path=folder / "packed"), name="packed", seq_len=seq_len)
    assert opened.layout.num_samples == counts["samples"]


@pytest.mark.parametrize("stride", [1, 2, 3, 7, 10])
def test_parts_of_a_time_are_evenly_spread(stride):
    """Whatever documents are long: every one, or each second one of the stream."""
    lengths = np.where(np.arange(3000 * stride) % stride == 0, 100, 1)
    times = times_of(lengths, 5, [RepeatConfig(from_tokens=100, times=5.5)])[lengths == 100]
    assert set(times.tolist()) == {5, 6}
    assert times.mean() == pytest.approx(5.5, abs=0.01)


WRONG_REPEATS = {
    "concat": ({"method": "concat", "repeats": [{"from_tokens": 8, "times": 2}]}, "use method=best_fit"),
    "twice": ({"repeats": [{"from_tokens": 8, "times": 2}, {"from_tokens": 8, "times": 3}]}, "leave one of them out"),
    "too long": ({"repeats": [{"from_tokens": 10**26, "times": 2}]}, "beyond 2"),
    "less than once": ({"repeats": [{"from_tokens": 8, "times": 0.5}]}, "greater than or equal to 1"),
}


@pytest.mark.parametrize(("settings", "words"), WRONG_REPEATS.values(), ids=WRONG_REPEATS)
def test_wrong_repeats(settings, words):
    """Refused in words."""
    with pytest.raises(ValidationError, match=words):
        PackConfig(**settings)


def test_windows_cost_padding_and_say_so(tmp_path):
    """More windows, more padding; the report has their number, and how many sequences more than the least there are."""
    tokens = write_tokens_folder(tmp_path / "tokens", random_documents(600, longest=50))
    counts = {
        window: pack(tokens, tmp_path / f"{window}", PackConfig(seq_len=64, window_documents=window)).manifest.counts
        for window in (None, 300, 20)
    }
    assert "windows" not in counts[None]["report"]
    assert [counts[window]["report"]["windows"] for window in (300, 20)] == [2, 30]
    paddings = [counts[window]["padding_percent"] for window in (None, 300, 20)]
    assert paddings == sorted(paddings)
    assert paddings[0] < paddings[2]
    least = -(-counts[None]["tokens"] // 64)
    assert counts[20]["report"]["sequences_above_least"] == counts[20]["samples"] - least > 0


def test_one_window_over_everything_is_the_packing_of_everything(tmp_path):
    """The same pieces in the same order, file by file."""
    tokens = write_tokens_folder(tmp_path / "tokens", random_documents(100))
    pack(tokens, tmp_path / "whole", PackConfig(seq_len=16))
    pack(tokens, tmp_path / "window", PackConfig(seq_len=16, window_documents=100))
    whole, window = all_bytes(tmp_path / "whole"), all_bytes(tmp_path / "window")
    assert all(whole[name] == window[name] for name in PIECE_FILES)


def test_windows_bound_the_memory(tmp_path):
    """300,000 documents: the pieces of all take 50 MB and more, those of a window of 10,000 a fraction."""
    lengths = np.random.default_rng(0).integers(1, 9, 300_000)
    with IndexedWriter(tmp_path / "pair", np.dtype(np.uint16)) as writer:
        writer.add(np.full(lengths.sum(), 5), lengths)
    peaks = {}
    for window in (10_000, None):
        pack(tmp_path / "pair", tmp_path / "warm", PackConfig(seq_len=8, window_documents=window))
        tracemalloc.start()
        pack(tmp_path / "pair", tmp_path / f"{window}", PackConfig(seq_len=8, window_documents=window))
        peaks[window] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peaks[10_000] < peaks[None] / 2


def test_a_window_of_no_documents_is_refused():
    """By the settings."""
    with pytest.raises(ValidationError, match="window_documents"):
        PackConfig(seq_len=8, window_documents=0)


GOLDEN = {16: "b45552aef60c9626", 24: "4955e1bad0821cd5"}
"""Of the four files of pieces, end to end, as they were before windows."""


@pytest.mark.parametrize("seq_len", GOLDEN)
def test_golden_pieces(tmp_path, seq_len):
    """Without a window the files are those of before, byte by byte: packed data that exists is packed data still."""
    folder = write_packed_folder(tmp_path / "packed", fixed_documents(300), seq_len=seq_len)
    contents = b"".join((folder / name).read_bytes() for name in sorted(PIECE_FILES))
    assert hashlib.sha256(contents).hexdigest()[:16] == GOLDEN[seq_len]
    for name in PIECE_FILES:
        np.save(tmp_path / "again.npy", np.load(folder / name))
        assert (tmp_path / "again.npy").read_bytes() == (folder / name).read_bytes()


def test_the_report_as_a_table(tmp_path):
    """What people read: padding, cuts, the histogram, the work of attention."""
    tokens = write_tokens_folder(tmp_path / "tokens", [np.full(size, 5) for size in (20, 5, 8, 4, 3)])
    counts = pack(tokens, tmp_path / "packed", PackConfig(seq_len=8, window_documents=3)).manifest.counts
    console = Console(width=140, file=io.StringIO())
    console.print(render(counts, "packed"))
    text = console.file.getvalue()
    for part in (
        "6, 1 above the least possible, in 2 windows of 3 documents",
        "8 tokens, 16.6667 %",
        "1 of 5, 2 cuts (1 do not fit in a sequence)",
        "1.17 on average, 2 at most",
        "5 sequences, 83.3 %",
        "76.85 % of the work without document masks",
    ):
        assert part in text
