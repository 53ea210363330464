"""Batches: the same for every number of ranks and after every restart, read by a thread that ends."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from megalite.config.schema import SourceConfig
from megalite.data.audit import EMPTY_CHAIN, chain
from megalite.data.loader import Batch, Loader
from megalite.data.samples import Samples, open_samples
from megalite.errors import DataError
from tests.data.factory import random_documents, write_packed_folder, write_pair

SEQ_LEN = 16
GLOBAL_BATCH_SIZE = 8


@pytest.fixture
def samples(tmp_path) -> Samples:
    return open_mixture(tmp_path)


def open_mixture(folder, *, masks: bool = True) -> Samples:
    """A packed and a bare source."""
    sources = [
        SourceConfig(path=write_packed_folder(folder / "a", random_documents(50), seq_len=SEQ_LEN), weight=2.0),
        SourceConfig(path=write_pair(folder / "b", random_documents(50, seed=1))),
    ]
    return open_samples(sources, seq_len=SEQ_LEN, seed=3, document_masks=masks)


def make_loader(samples: Samples, *, dp_size: int = 1, dp_rank: int = 0, micro_batch_size: int = 2) -> Loader:
    return Loader(
        samples,
        seq_len=SEQ_LEN,
        micro_batch_size=micro_batch_size,
        global_batch_size=GLOBAL_BATCH_SIZE,
        dp_size=dp_size,
        dp_rank=dp_rank,
        prefetch=3,
    )


def by_key(batches: list[Batch]) -> dict[int, tuple]:
    """What each token of a step is, by its name."""
    return {
        key: values
        for batch in batches
        for key, *values in zip(
            *(getattr(batch, name).tolist() for name in ("keys", "tokens", "labels", "loss_mask", "positions")),
            strict=True,
        )
    }


@pytest.mark.parametrize(("dp_size", "micro_batch_size"), [(1, 8), (2, 1), (2, 2), (4, 2), (8, 1)])
def test_every_layout_reads_the_same_step(samples, dp_size, micro_batch_size):
    """The ranks' batches together are the global samples of the step, none twice, whatever dp and micro-batch are."""
    expected = by_key(make_loader(samples).step_batches(5))
    assert sorted(expected) == list(range(4 * GLOBAL_BATCH_SIZE * SEQ_LEN, 5 * GLOBAL_BATCH_SIZE * SEQ_LEN))
    ranks = [
        make_loader(samples, dp_size=dp_size, dp_rank=rank, micro_batch_size=micro_batch_size).step_batches(5)
        for rank in range(dp_size)
    ]
    found = [by_key(batches) for batches in ranks]
    assert sum(map(len, found)) == len(expected)
    assert {key: value for part in found for key, value in part.items()} == expected


def test_place_of_a_micro_batch(samples):
    """dp rank r's a-th micro-batch holds global offsets (a x dp + r) x m + [0, m)."""
    batches = make_loader(samples, dp_size=2, dp_rank=1, micro_batch_size=2).step_batches(3)
    offsets = [sorted({key // SEQ_LEN for key in batch.keys.tolist()}) for batch in batches]
    assert offsets == [[16 + 2, 16 + 3], [16 + 6, 16 + 7]]


def test_a_batch_is_its_samples_end_to_end(samples):
    """Contents, shapes and types, against the samples themselves."""
    (batch,) = make_loader(samples, micro_batch_size=8).step_batches(1)
    rows = [samples.sample(index) for index in range(8)]
    for name in ("tokens", "labels", "loss_mask", "positions"):
        assert getattr(batch, name).tolist() == np.concatenate([getattr(row, name) for row in rows]).tolist()
    kinds = {batch.tokens.dtype, batch.labels.dtype, batch.positions.dtype, batch.keys.dtype}
    assert kinds == {torch.int64}
    assert (batch.loss_mask.dtype, batch.cu_seqlens.dtype) == (torch.bool, torch.int32)


@pytest.mark.parametrize("masks", [True, False])
def test_spans_of_attention(tmp_path, masks):
    """With masks a span is a document within a sequence, padding taken as one; without, it is the sequence."""
    samples = open_mixture(tmp_path, masks=masks)
    (batch,) = make_loader(samples, micro_batch_size=8).step_batches(2)
    borders = [0]
    for index in range(8, 16):
        ids = samples.sample(index).document_ids
        inner = (np.flatnonzero(np.diff(ids)) + 1).tolist() if masks else []
        base = (index - 8) * SEQ_LEN
        borders += [base + place for place in [*inner, SEQ_LEN]]
    assert batch.cu_seqlens.tolist() == borders
    assert batch.max_seqlen == max(np.diff(borders))


def test_reading_ahead_changes_nothing(samples):
    """Iteration gives what direct reading gives, from any step: a restart continues the same sequence."""
    loader = make_loader(samples, dp_size=2, dp_rank=1)
    steps = dict(loader.steps(1, 9))
    assert list(steps) == list(range(1, 10))
    for step, batches in make_loader(samples, dp_size=2, dp_rank=1).steps(6, 9):
        assert by_key(batches) == by_key(steps[step]) == by_key(loader.step_batches(step))


def test_every_sample_of_an_epoch_is_used_once(tmp_path):
    """Over the steps of one epoch, on four ranks."""
    folder = write_packed_folder(tmp_path / "a", random_documents(200), seq_len=SEQ_LEN)
    samples = open_samples([SourceConfig(path=folder)], seq_len=SEQ_LEN, seed=1, document_masks=True)
    num_steps = samples.num_samples_per_epoch // GLOBAL_BATCH_SIZE
    used = [
        samples.identity(key // SEQ_LEN)
        for rank in range(4)
        for _, batches in make_loader(samples, dp_size=4, dp_rank=rank).steps(1, num_steps)
        for batch in batches
        for key in batch.keys.tolist()[::SEQ_LEN]
    ]
    assert len(set(used)) == len(used) == num_steps * GLOBAL_BATCH_SIZE
    assert {identity.epoch for identity in used} == {0}


def loader_threads() -> int:
    return sum(thread.name == "megalite-loader" for thread in threading.enumerate())


def test_the_thread_ends(samples):
    """After the last step, on leaving early, on close, and when another iteration begins."""
    loader = make_loader(samples)
    list(loader.steps(1, 2))
    assert loader_threads() == 0
    for _ in loader.steps(1, 1000):
        break
    loader.close()
    assert loader_threads() == 0
    running = loader.steps(1, 1000)
    next(running)
    again = loader.steps(1, 1000)
    next(again)
    assert loader_threads() == 1
    again.close()
    assert loader_threads() == 0


def test_errors_of_the_thread_reach_the_consumer(samples, monkeypatch):
    """They name the global sample, the source and its place, after the steps before it were delivered."""
    read = samples.sample
    bad = 2 * GLOBAL_BATCH_SIZE + 1

    def fail(index: int):
        if index == bad:
            raise OSError(5, "Input/output error")
        return read(index)

    monkeypatch.setattr(samples, "sample", fail)
    source, epoch, position = samples.identity(bad)
    delivered = []
    with pytest.raises(DataError) as caught:
        delivered.extend(step for step, _ in make_loader(samples).steps(1, 5))
    assert delivered == [1, 2]
    expected = f"global sample {bad} (source {source!r}, epoch {epoch}, sample {position} of it) cannot be read"
    assert expected in str(caught.value)
    assert "Input/output error" in str(caught.value)
    assert loader_threads() == 0


def test_to_moves_every_tensor(samples):
    """The copy on the meta device has all shapes and no data."""
    (batch,) = make_loader(samples, micro_batch_size=8).step_batches(1)
    moved = batch.to("meta", non_blocking=True)
    assert {value.device.type for value in vars(moved).values() if isinstance(value, torch.Tensor)} == {"meta"}
    assert moved.max_seqlen == batch.max_seqlen
    assert moved.cu_seqlens.shape == batch.cu_seqlens.shape


def test_chain_does_not_depend_on_how_a_range_is_covered(samples):
    """One call, one a step, or uneven ones: the same hash; another range another one."""
    whole = chain(EMPTY_CHAIN, samples, 0, 40)
    link = EMPTY_CHAIN
    for start, stop in ((0, 8), (8, 8), (8, 9), (9, 40)):
        link = chain(link, samples, start, stop)
    assert link == whole
    assert len(whole) == 32
    assert chain(EMPTY_CHAIN, samples, 0, 41) != whole
    assert chain(EMPTY_CHAIN, samples, 1, 41) != chain(EMPTY_CHAIN, samples, 0, 40)


def test_chain_follows_the_order(tmp_path):
    """Another seed reads the same samples in another order: another chain."""
    path = write_pair(tmp_path / "pair", random_documents(50))
    chains = {
        chain(EMPTY_CHAIN, open_samples([SourceConfig(path=path)], seq_len=16, seed=seed, document_masks=True), 0, 20)
        for seed in (1, 2, 3)
    }
    assert len(chains) == 3
