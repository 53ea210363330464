"""Batches: the same for every number of ranks and after every restart, read by a thread that ends."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.config.batch_sizes import BatchSizes
from megalite.config.schema import SourceConfig
from megalite.data.audit import EMPTY_CHAIN, chain
from megalite.data.gather import count_up, span_borders
from megalite.data.loader import Batch, Loader
from megalite.data.mix_plan import MixSettings, StageSettings
from megalite.data.samples import Samples, open_samples
from megalite.errors import DataError
from tests.data.golden import fixed_documents, hash_of
from tests.kit.data import random_documents, write_packed_folder, write_pair

SEQ_LEN = 16
GLOBAL_BATCH_SIZE = 8

TENSORS = ("tokens", "labels", "loss_mask", "positions", "cu_seqlens", "keys")
"""Of a batch."""


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


def make_loader(
    samples: Samples, *, dp_size: int = 1, dp_rank: int = 0, micro_batch_size: int = 2, pin_memory: bool = False
) -> Loader:
    return Loader(
        samples,
        micro_batch_size=micro_batch_size,
        batch_sizes=BatchSizes.fixed(GLOBAL_BATCH_SIZE),
        dp_size=dp_size,
        dp_rank=dp_rank,
        prefetch=3,
        pin_memory=pin_memory,
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
    assert batch.max_seqlen == SEQ_LEN


def test_reading_ahead_changes_nothing(samples):
    """Iteration gives what direct reading gives, from any step: a restart continues the same sequence."""
    loader = make_loader(samples, dp_size=2, dp_rank=1)
    steps = dict(loader.steps(1, 9))
    assert list(steps) == list(range(1, 10))
    for step, batches in make_loader(samples, dp_size=2, dp_rank=1).steps(6, 9):
        assert by_key(batches) == by_key(steps[step]) == by_key(loader.step_batches(step))


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_stages_begin_at_their_sample_and_resume(tmp_path, dp_size):
    """A border inside step 4: all ranks together read what one does, and a restart on either side goes on the same."""
    sources = [SourceConfig(path=write_pair(tmp_path / name, random_documents(50))) for name in ("a", "b", "c")]
    stages = (
        StageSettings(until_tokens=(3 * GLOBAL_BATCH_SIZE + 3) * SEQ_LEN, weights={"a": 3, "b": 1}),
        StageSettings(weights={"c": 1}),
    )
    samples = open_samples(sources, seq_len=SEQ_LEN, seed=3, document_masks=True, mix=MixSettings(stages=stages))
    border = 3 * GLOBAL_BATCH_SIZE + 3
    drawn = samples.identities(0, 6 * GLOBAL_BATCH_SIZE)[:, 0]
    assert (drawn[:border] != 2).all()
    assert (drawn[border:] == 2).all()
    whole = {step: by_key(batches) for step, batches in make_loader(samples).steps(1, 6)}
    for first in (1, 4, 5):
        ranks = [dict(make_loader(samples, dp_size=dp_size, dp_rank=rank).steps(first, 6)) for rank in range(dp_size)]
        for step in range(first, 7):
            together = {key: value for rank in ranks for key, value in by_key(rank[step]).items()}
            assert together == whole[step]


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


@pytest.mark.parametrize(("tokens_at_once", "group"), [(1, 1), (4 * SEQ_LEN, 2), (1 << 17, 4096)])
def test_the_thread_reads_no_further_than_it_may(samples, monkeypatch, tokens_at_once, group):
    """Three batches, or a group of them, wait; one group is in the thread's hands, and one is taken."""
    monkeypatch.setattr("megalite.data.loader.TOKENS_AT_ONCE", tokens_at_once)
    read, calls = samples.read, []

    def counted(places: np.ndarray, **options: bool):
        calls.append(len(places) // 2)
        return read(places, **options)

    monkeypatch.setattr(samples, "read", counted)
    steps = make_loader(samples).steps(1, 10_000)
    next(steps)
    time.sleep(0.2)
    assert max(calls) == min(group, 2048)
    taken = -(-4 // group)
    assert sum(calls) <= (taken + max(1, 3 // group) + 1) * group
    steps.close()


def test_errors_of_the_thread_reach_the_consumer(samples, monkeypatch):
    """They name the global sample, the source and its place, after the steps before it were delivered."""
    read = samples.read
    bad = 2 * GLOBAL_BATCH_SIZE + 1
    source, epoch, position = samples.identity(bad)
    place = samples.identities(bad, bad + 1)[0].tolist()

    def fail(places: np.ndarray, **options: bool):
        if place in places.tolist():
            raise OSError(5, "Input/output error")
        return read(places, **options)

    monkeypatch.setattr(samples, "read", fail)
    delivered = []
    with pytest.raises(DataError) as caught:
        delivered.extend(step for step, _ in make_loader(samples).steps(1, 5))
    assert delivered == [1, 2]
    expected = f"global sample {bad} (source {source!r}, epoch {epoch}, sample {position} of it) cannot be read"
    assert expected in str(caught.value)
    assert "Input/output error" in str(caught.value)
    assert loader_threads() == 0


def test_a_bad_token_is_named_by_its_document_and_byte(tmp_path, monkeypatch):
    """What the owner of the files needs: the sample, the document in its source, and the byte of the token file."""
    monkeypatch.setattr("megalite.data.vocabulary.largest_token", lambda tokens: 0)
    documents = [np.full(size, 5) for size in (20, 9, 30, 40)]
    documents[2][7] = 1500
    folder = write_packed_folder(tmp_path / "a", documents, seq_len=SEQ_LEN)
    samples = open_samples([SourceConfig(path=folder)], seq_len=SEQ_LEN, seed=3, document_masks=True)
    with pytest.raises(DataError) as caught:
        list(make_loader(samples).steps(1, 2))
    message = str(caught.value)
    assert "token id 1500 found in document 2, byte 72 of tokens.bin, the vocabulary ends at 999" in message
    named = int(message.split("global sample ")[1].split()[0])
    monkeypatch.setattr(samples, "_vocab_size", 2000)
    assert 1500 in samples.sample(named).tokens


def test_a_bad_label_behind_the_sample_is_named_too(tmp_path, monkeypatch):
    """The last label is read ahead: its token belongs to the next sample of the document."""
    monkeypatch.setattr("megalite.data.vocabulary.largest_token", lambda tokens: 0)
    document = np.full(3 * SEQ_LEN, 5)
    document[2 * SEQ_LEN] = 1500
    folder = write_packed_folder(tmp_path / "a", [document], seq_len=SEQ_LEN)
    samples = open_samples([SourceConfig(path=folder)], seq_len=SEQ_LEN, seed=3, document_masks=True)
    behind = samples.identities(0, 3)[:, 2].tolist().index(1)
    with pytest.raises(DataError, match=f"token id 1500 found in document 0, byte {2 * 2 * SEQ_LEN} of"):
        samples.sample(behind)


def test_a_file_cut_during_the_run_stops_it(tmp_path, monkeypatch):
    """Before each stretch of samples the sizes are compared, so the run ends with an error and not with SIGBUS."""
    monkeypatch.setattr("megalite.data.loader.SAMPLES_AHEAD", GLOBAL_BATCH_SIZE)
    samples = open_mixture(tmp_path)
    steps = make_loader(samples).steps(1, 1000)
    next(steps)
    path = tmp_path / "b.bin"
    os.truncate(path, path.stat().st_size - 2)
    with pytest.raises(DataError, match=r"b\.bin: changed while it was read: \d+ bytes now, \d+ when it was opened"):
        list(steps)
    assert loader_threads() == 0


@pytest.mark.parametrize("tokens_at_once", [1, 2 * SEQ_LEN, 5 * SEQ_LEN, 1 << 17])
def test_reading_in_groups_changes_nothing(samples, monkeypatch, tokens_at_once):
    """Micro-batches read one by one, a few at once or all at once are the same, and come in the same order."""
    expected = [batch for step in range(1, 8) for batch in make_loader(samples).step_batches(step)]
    monkeypatch.setattr("megalite.data.loader.TOKENS_AT_ONCE", tokens_at_once)
    found = [batch for _, batches in make_loader(samples).steps(1, 7) for batch in batches]
    assert len(found) == len(expected) == 28
    for one, other in zip(found, expected, strict=True):
        for name, value in vars(one).items():
            same = getattr(other, name)
            assert torch.equal(value, same) if isinstance(value, torch.Tensor) else value == same


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=30),
    rows=st.integers(1, 3),
    first=st.integers(0, 2**62),
)
@settings(max_examples=100, deadline=None)
def test_spans_and_keys_equal_numpy(lengths, rows, first):
    """The walk from the end against a search for zeros, and counting up against arange."""
    positions = np.concatenate([np.arange(length) for length in lengths])
    borders = span_borders(positions)
    assert borders.dtype == np.int32
    assert borders.tolist() == [*np.flatnonzero(positions == 0).tolist(), positions.size]
    keys = np.empty((rows, 5), np.int64)
    firsts = np.arange(rows) * 1000 + first
    count_up(keys, firsts)
    assert keys.tolist() == [list(range(number, number + 5)) for number in firsts.tolist()]


GOLDEN = {
    ("best_fit", True, 1): "c389828a15dc5b9f",
    ("best_fit", True, 2): "ac43795ee9314e51",
    ("best_fit", True, 1234): "c28f05b029c4ba3b",
    ("best_fit", False, 1): "7ff001631c6b460d",
    ("best_fit", False, 2): "448e7b01248c2c90",
    ("best_fit", False, 1234): "a7a053f5d29fe302",
    ("concat", True, 1): "3a5aa38496f20491",
    ("concat", True, 2): "ecae6e394ec847e7",
    ("concat", True, 1234): "5249be7c4e957cb7",
    ("concat", False, 1): "7dc3190968ece36a",
    ("concat", False, 2): "dc65a721300d1d15",
    ("concat", False, 1234): "f0d260554730e5f3",
}
"""Hash of every field of the batches of steps 3 to 20 on rank 1 of 2, taken before there was a compiled reader."""


@pytest.mark.parametrize(("method", "masks", "seed"), GOLDEN)
def test_golden_batches(tmp_path, method, masks, seed):
    """Runs from before go on with the batches that they would have had, bit for bit."""
    packed = write_packed_folder(tmp_path / f"{method}16", fixed_documents(300), seq_len=16, method=method)
    sources = [
        SourceConfig(path=packed, weight=3),
        SourceConfig(path=write_pair(tmp_path / "pair", fixed_documents(100, 5))),
        SourceConfig(path=write_pair(tmp_path / "wide", fixed_documents(40, 9), vocab_size=70_000), weight=0.3),
    ]
    samples = open_samples(sources, seq_len=16, seed=seed, document_masks=masks)
    loader = Loader(samples, micro_batch_size=4, batch_sizes=BatchSizes.fixed(16), dp_size=2, dp_rank=1, prefetch=2)
    names = ("tokens", "labels", "loss_mask", "positions", "cu_seqlens", "keys")
    arrays = []
    for _, batches in loader.steps(3, 20):
        for batch in batches:
            arrays += [getattr(batch, name).numpy() for name in names] + [
                np.diff(batch.borders).max(keepdims=True).astype(np.int64)
            ]
    assert hash_of(*arrays) == GOLDEN[method, masks, seed]


def test_to_moves_every_tensor(samples):
    """The copy on the meta device has all shapes and no data; the host keeps the borders that it knows."""
    (batch,) = make_loader(samples, micro_batch_size=8).step_batches(1)
    moved = batch.to("meta", non_blocking=True)
    places = {name: value.device.type for name, value in vars(moved).items() if isinstance(value, torch.Tensor)}
    assert places.pop("borders") == "cpu"
    assert set(places.values()) == {"meta"}
    assert torch.equal(moved.borders, batch.cu_seqlens)
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


def test_batches_for_a_gpu_are_pinned_by_the_reading_thread(samples, monkeypatch):
    """With a stand-in for CUDA: the thread takes the rank's own device, and pins every tensor of what it hands out."""
    pinned, devices = [], []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        assert threading.current_thread() is not threading.main_thread()
        pinned.append(tensor.clone())
        return pinned[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    loader = make_loader(samples, pin_memory=True)
    found = [batch for _, batches in loader.steps(1, 3) for batch in batches]
    assert devices == [3]
    handed_out = {id(tensor) for tensor in pinned}
    for batch in found:
        assert all(id(getattr(batch, name)) in handed_out for name in TENSORS)
    expected = [batch for step in (1, 2, 3) for batch in make_loader(samples).step_batches(step)]
    assert len(found) == len(expected)
    for batch, other in zip(found, expected, strict=True):
        assert all(torch.equal(getattr(batch, name), getattr(other, name)) for name in TENSORS)
        assert batch.max_seqlen == other.max_seqlen
