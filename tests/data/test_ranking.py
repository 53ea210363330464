"""Order by score: a curriculum inside a source, against scoring token by token."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.config.schema import SourceConfig
from megalite.data.mix_plan import MixSettings
from megalite.data.ranking import RankedOrder, damage_of_ranks, load_scores, write_ranks
from megalite.data.samples import open_samples
from megalite.errors import DataError
from tests.kit.data import random_documents, write_packed_folder

SEQ_LEN = 16
DOCUMENTS = random_documents(60, longest=40)


@given(size=st.integers(1, 100), stretches=st.integers(1, 120), key=st.text(max_size=3))
@settings(max_examples=40, deadline=None)
def test_ranked_order_is_shuffled_in_stretches_only(size, stretches, key):
    """A bijection; each stretch of the order holds exactly that stretch of the ranking; as many as there are: none."""
    ranks = np.random.default_rng(size).permutation(size)
    order = RankedOrder(ranks, key, stretches)
    found = order.many(np.arange(size))
    stretches = min(stretches, size)
    borders = [size * number // stretches for number in range(stretches + 1)]
    for start, stop in pairwise(borders):
        assert sorted(found[start:stop].tolist()) == sorted(ranks[start:stop].tolist())
    if stretches == size:
        assert (found == ranks).all()
    assert [order(index) for index in range(size)] == found.tolist()


@pytest.mark.parametrize("method", ["best_fit", "concat"])
def test_samples_in_order_of_a_score(tmp_path, method):
    """Against scoring token by token: each epoch rises, each sample comes once, and the fingerprint knows."""
    folder = write_packed_folder(tmp_path / "packed", DOCUMENTS, seq_len=SEQ_LEN, method=method)
    scores = np.random.default_rng(1).normal(size=len(DOCUMENTS))
    plain = open_samples([SourceConfig(path=folder)], seq_len=SEQ_LEN, seed=1, document_masks=True)
    write_ranks(plain.sources[0].layout, scores, tmp_path / "ranks.npy")
    mix = MixSettings(ranks={"packed": tmp_path / "ranks.npy"}, rank_stretches=10**9)
    configs = [SourceConfig(path=folder)]
    samples = open_samples(configs, seq_len=SEQ_LEN, seed=1, document_masks=True, mix=mix)
    num_samples = samples.num_samples_per_epoch
    for epoch in range(2):
        rows = [samples.sample(epoch * num_samples + index) for index in range(num_samples)]
        means = [np.mean([scores[document] for document in row.document_ids if document >= 0]) for row in rows]
        assert (np.diff(means) > -1e-12).all()
    assert sorted(samples.identities(0, num_samples)[:, 2].tolist()) == list(range(num_samples))
    assert samples.fingerprint != plain.fingerprint


def test_bad_scores_and_ranks_are_refused(tmp_path):
    """A score that is none, too few of them, ranks of other samples, of an unknown source, or no file."""
    folder = write_packed_folder(tmp_path / "packed", DOCUMENTS, seq_len=SEQ_LEN)
    layout = open_samples([SourceConfig(path=folder)], seq_len=SEQ_LEN, seed=1, document_masks=True).sources[0].layout
    scores = np.zeros(len(DOCUMENTS))
    with pytest.raises(DataError, match=r"scores: 59 found, but there is a document 59; give one for each"):
        write_ranks(layout, scores[:-1], tmp_path / "ranks.npy")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=r"folder: cannot be written: Is a directory"):
        write_ranks(layout, scores, tmp_path / "folder")
    assert list(tmp_path.glob(".*.tmp")) == []
    scores[7] = np.nan
    with pytest.raises(DataError, match=r"scores: document 7 has nan"):
        write_ranks(layout, scores, tmp_path / "ranks.npy")
    np.save(tmp_path / "short.npy", np.arange(3))
    for ranks, message in (
        ({"packed": tmp_path / "short.npy"}, r"holds 3 numbers, \d+ expected"),
        ({"packt": tmp_path / "short.npy"}, r"data\.mix\.ranks\.packt: no such source; there are packed"),
        ({"packed": tmp_path / "missing.npy"}, r"missing\.npy: cannot be read"),
    ):
        with pytest.raises(DataError, match=message):
            open_samples(
                [SourceConfig(path=folder)], seq_len=SEQ_LEN, seed=1, document_masks=True, mix=MixSettings(ranks=ranks)
            )


def test_ranks_that_name_no_sample_are_refused(tmp_path):
    """The right size, but numbers beyond the source, or one of them twice: found at opening, and by `data verify`."""
    folder = write_packed_folder(tmp_path / "packed", DOCUMENTS, seq_len=SEQ_LEN)
    configs = [SourceConfig(path=folder)]
    plain = open_samples(configs, seq_len=SEQ_LEN, seed=1, document_masks=True)
    for wrong, message in ((10**12, "it names a sample that is not there"), (-1, "not there"), (0, "a sample twice")):
        np.save(tmp_path / "ranks.npy", np.full(plain.num_samples_per_epoch, wrong))
        mix = MixSettings(ranks={"packed": tmp_path / "ranks.npy"})
        with pytest.raises(DataError, match=f"damaged: {message}|damaged: .*{message}"):
            open_samples(configs, seq_len=SEQ_LEN, seed=1, document_masks=True, mix=mix)
        assert message in damage_of_ranks(tmp_path / "ranks.npy")


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (np.zeros(6), r"found shape \(6,\) of float64, expected 5 real numbers"),
        (np.zeros(4), r"found shape \(4,\)"),
        (np.zeros((5, 2)), r"found shape \(5, 2\)"),
        (np.zeros(5, complex), "of complex128"),
        (np.array(["a"] * 5), "of <U1"),
    ],
)
def test_scores_are_a_real_number_for_each_document(tmp_path, scores, message):
    """Not more, not fewer, and of no other kind."""
    np.save(tmp_path / "scores.npy", scores)
    with pytest.raises(DataError, match=message):
        load_scores(tmp_path / "scores.npy", 5)


def test_files_of_scores_that_are_none(tmp_path):
    """Empty, cut, several arrays, or not there."""
    np.savez(tmp_path / "several.npz", a=np.zeros(5))
    (tmp_path / "several.npz").rename(tmp_path / "several.npy")
    np.save(tmp_path / "cut.npy", np.zeros(5))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "cut.npy").read_bytes()[:-3])
    (tmp_path / "empty.npy").write_bytes(b"")
    for name, message in (("several", "several arrays"), ("cut", "damaged"), ("empty", "damaged"), ("no", "missing")):
        with pytest.raises(DataError, match=rf"{name}\.npy.*{message}"):
            load_scores(tmp_path / f"{name}.npy", 5)
