"""Packing: nothing lost, repeated or reordered, only long documents cut, and as tight as the slow plain algorithm."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.data.best_fit import assign_pieces, cut_documents, group_pieces
from megalite.data.indexed import IndexedTokens
from megalite.data.layout import ConcatLayout, PackedLayout
from megalite.data.manifest import find_manifest
from megalite.data.pack import pack
from megalite.data.recipe import PackConfig
from megalite.errors import DataError
from tests.data.factory import random_documents, write_packed_folder, write_pair, write_tokens_folder

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
