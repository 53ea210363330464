"""Samples against a slow plain reading of the documents, and every complaint about data that does not fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.config.schema import SourceConfig
from megalite.data.indexed import IndexedTokens
from megalite.data.layout import (
    ConcatLayout,
    PackedLayout,
)
from megalite.data.mix_plan import MixSettings, StageSettings
from megalite.data.pack import pack
from megalite.data.sample import Sample
from megalite.data.samples import Samples, open_samples, open_validation_samples, open_validation_sets
from megalite.data.settings import PackConfig
from megalite.errors import DataError
from megalite.tokenizer.tokenizer import Tokenizer
from tests.kit.data import random_documents, write_packed_folder, write_pair, write_tokens_folder

SEQ_LEN = 16
DOCUMENTS = random_documents(60, longest=40)


def open_one(path: Path, *, masks: bool = True, seed: int = 1):
    return open_samples([SourceConfig(path=path)], seq_len=SEQ_LEN, seed=seed, document_masks=masks)


@pytest.fixture(params=["best_fit", "concat", "tokens folder", "bare pair"])
def source(request, tmp_path) -> Path:
    """The same documents in each form that training reads."""
    if request.param == "bare pair":
        return write_pair(tmp_path / "pair", DOCUMENTS)
    if request.param == "tokens folder":
        return write_tokens_folder(tmp_path / "tokens", DOCUMENTS)
    return write_packed_folder(tmp_path / "packed", DOCUMENTS, seq_len=SEQ_LEN, method=request.param)


def epoch_of(samples) -> list[Sample]:
    return [samples.sample(index) for index in range(samples.num_samples_per_epoch)]


def test_an_epoch_holds_every_token_of_every_document_once(source):
    """Collected by document id, the inputs of an epoch are the documents."""
    found: dict[int, Counter] = {}
    for sample in epoch_of(open_one(source)):
        for token, document in zip(sample.tokens.tolist(), sample.document_ids.tolist(), strict=True):
            found.setdefault(document, Counter())[token] += 1
    padding = found.pop(-1, Counter())
    assert set(padding) <= {0}
    assert found == {number: Counter(document.tolist()) for number, document in enumerate(DOCUMENTS)}


def test_labels_with_masks_are_the_next_token_of_the_document(source):
    """No label is lost, not even at a cut inside a document, and none crosses a border.

    Every (token, next token) pair of every document is learned exactly once in an epoch.
    """
    learned: Counter = Counter()
    for sample in epoch_of(open_one(source)):
        assert not sample.labels[~sample.loss_mask].any()
        chosen = sample.loss_mask
        learned.update(zip(sample.document_ids[chosen], sample.tokens[chosen], sample.labels[chosen], strict=True))
    expected = Counter(
        (number, token, following)
        for number, document in enumerate(DOCUMENTS)
        for token, following in pairwise(document.tolist())
    )
    assert learned == expected


def test_positions_with_masks_restart_in_each_document(source):
    """0, 1, 2, ... in each run of one document id, padding included."""
    for sample in epoch_of(open_one(source)):
        place = 0
        for index in range(SEQ_LEN):
            place = place + 1 if index and sample.document_ids[index] == sample.document_ids[index - 1] else 0
            assert sample.positions[index] == place


def test_samples_without_masks_are_plain_text(source):
    """Positions count through, and each label is the token that stands next, over borders as well."""
    for sample in epoch_of(open_one(source, masks=False)):
        filled = int((sample.document_ids >= 0).sum())
        assert sample.positions.tolist() == list(range(SEQ_LEN))
        assert sample.loss_mask[: filled - 1].all()
        assert sample.labels[: filled - 1].tolist() == sample.tokens[1:filled].tolist()
        assert not sample.loss_mask[filled:].any()


def test_concat_without_masks_learns_every_token_but_the_first(tmp_path):
    """The last label of a sample is the first token of the next: the chunks together are the whole stream."""
    samples = open_validation_samples(
        [SourceConfig(path=write_pair(tmp_path / "pair", DOCUMENTS))], seq_len=SEQ_LEN, document_masks=False
    )
    rows = epoch_of(samples)
    stream = np.concatenate(DOCUMENTS)
    labels = np.concatenate([row.labels[row.loss_mask] for row in rows])
    assert labels.tolist() == stream[1:].tolist()
    inputs = np.concatenate([row.tokens[row.document_ids >= 0] for row in rows])
    assert inputs.tolist() == stream.tolist()


def test_one_document_longer_than_many_sequences(tmp_path):
    """It is cut, and no label is lost at any cut, under both methods."""
    document = np.arange(3, 3 + 5 * SEQ_LEN + 3)
    for method in ("best_fit", "concat"):
        folder = write_packed_folder(tmp_path / method, [document], seq_len=SEQ_LEN, method=method)
        rows = epoch_of(open_one(folder))
        labels = np.sort(np.concatenate([row.labels[row.loss_mask] for row in rows]))
        assert labels.tolist() == document[1:].tolist()


def test_concat_pieces_equal_plain_cutting(tmp_path):
    """The bisected layout against cutting the list of (document, position) by hand."""
    documents = random_documents(40, longest=9)
    tokens = IndexedTokens(write_pair(tmp_path / "pair", documents))
    owners = np.concatenate([np.full(document.size, number) for number, document in enumerate(documents)])
    for seq_len in (1, 2, 7, 64, 1000):
        layout = ConcatLayout(tokens, seq_len)
        assert layout.num_samples == -(-owners.size // seq_len)
        for sample in range(layout.num_samples):
            pieces = layout.pieces(sample)
            expected = owners[sample * seq_len : (sample + 1) * seq_len]
            assert np.repeat(pieces.documents, pieces.lengths).tolist() == expected.tolist()
            assert pieces.starts[0] == sample * seq_len
            assert (pieces.starts[1:] == pieces.starts[:-1] + pieces.lengths[:-1]).all()


def test_document_ids_are_unique_over_sources(tmp_path):
    """Two sources with the same documents do not share ids."""
    paths = [write_pair(tmp_path / name, DOCUMENTS[:30]) for name in ("a", "b")]
    samples = open_samples([SourceConfig(path=path) for path in paths], seq_len=SEQ_LEN, seed=1, document_masks=True)
    by_source: dict[str, set[int]] = {"a": set(), "b": set()}
    for index in range(samples.num_samples_per_epoch):
        ids = samples.sample(index).document_ids
        by_source[samples.identity(index).source] |= set(ids[ids >= 0].tolist())
    assert by_source == {"a": set(range(30)), "b": set(range(30, 60))}


def test_weights_share_out_the_samples(tmp_path):
    """3 : 1 is met exactly over any multiple of four."""
    sources = [
        SourceConfig(path=write_pair(tmp_path / name, DOCUMENTS), weight=weight)
        for name, weight in (("a", 3), ("b", 1))
    ]
    samples = open_samples(sources, seq_len=SEQ_LEN, seed=1, document_masks=True)
    drawn = Counter(samples.identity(index).source for index in range(400))
    assert drawn == {"a": 300, "b": 100}


def test_sources_of_one_name_are_told_apart(tmp_path):
    """`x/train` and `y/train` become train and train-2; a given name stays."""
    paths = [write_pair(tmp_path / name / "train", DOCUMENTS) for name in ("x", "y", "z")]
    configs = [SourceConfig(path=paths[0]), SourceConfig(path=paths[1]), SourceConfig(path=paths[2], name="books")]
    samples = open_samples(configs, seq_len=SEQ_LEN, seed=1, document_masks=True)
    assert [source.name for source in samples.sources] == ["train", "train-2", "books"]


def test_fingerprint_follows_data_order_and_cut(tmp_path):
    """Equal for equal data, also elsewhere on disk; different for another seed, share, length, mask or document."""

    def fingerprint(folder: str, documents=DOCUMENTS, *, seq_len=SEQ_LEN, seed=1, masks=True, weights=(1, 1)) -> str:
        path = write_tokens_folder(tmp_path / folder / "tokens", documents)
        sources = [SourceConfig(path=path, weight=weight) for weight in weights]
        return open_samples(sources, seq_len=seq_len, seed=seed, document_masks=masks).fingerprint

    base = fingerprint("a")
    assert fingerprint("b") == fingerprint("a", weights=(2, 2)) == base
    changed = [*DOCUMENTS[:-1], DOCUMENTS[-1] + 1]
    others = [
        fingerprint("a", seed=2),
        fingerprint("a", masks=False),
        fingerprint("a", seq_len=8),
        fingerprint("a", weights=(1, 2)),
        fingerprint("a", weights=(1,)),
        fingerprint("c", changed),
    ]
    assert len({base, *others}) == 7


def test_moved_data_still_opens(tmp_path):
    """Manifests point to each other relatively."""
    write_packed_folder(tmp_path / "here" / "packed", DOCUMENTS, seq_len=SEQ_LEN)
    (tmp_path / "here").rename(tmp_path / "there")
    samples = open_one(tmp_path / "there" / "packed")
    assert samples.tokenizer_path == tmp_path / "there" / "tokenizer"
    assert samples.vocab_size == 1000


def damage_length(folder: Path) -> None:
    path = folder.parent / "packed-tokens" / "tokens.bin"
    path.write_bytes(path.read_bytes()[:-2])


def repack_below(folder: Path) -> None:
    write_tokens_folder(folder.parent / "packed-tokens", DOCUMENTS[:-1], tokenizer="another")


BAD_FOLDERS = {
    "truncated bin": (damage_length, r"tokens\.bin: \d+ bytes found, \d+ expected"),
    "other tokens": (repack_below, "has changed since it was packed"),
    "lost index": (lambda folder: (folder / "piece_starts.npy").unlink(), r"piece_starts\.npy: missing"),
    "bad manifest": (lambda folder: (folder / "manifest.json").write_text("{"), r"manifest\.json: damaged"),
    "unfinished": (lambda folder: folder.rename(f"{folder}.partial"), "unfinished: its station was interrupted"),
}


@pytest.mark.parametrize("damage", BAD_FOLDERS)
def test_damaged_packed_folders_are_refused(tmp_path, damage):
    """Each damage is found when the folder is opened."""
    folder = write_packed_folder(tmp_path / "packed", DOCUMENTS, seq_len=SEQ_LEN)
    apply, message = BAD_FOLDERS[damage]
    apply(folder)
    with pytest.raises(DataError, match=message):
        open_one(folder)


def test_all_complaints_come_at_once(tmp_path):
    """Missing, empty, cut for another length, a foreign folder, tokens of two tokenizers and beyond the vocabulary."""
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.md").write_text("hello")
    paths = [
        tmp_path / "missing",
        write_pair(tmp_path / "empty", []),
        write_packed_folder(tmp_path / "short", DOCUMENTS, seq_len=8),
        tmp_path / "foreign",
        write_tokens_folder(tmp_path / "one", DOCUMENTS, tokenizer="one"),
        write_tokens_folder(tmp_path / "two", DOCUMENTS, tokenizer="two"),
    ]
    with pytest.raises(DataError) as caught:
        open_samples([SourceConfig(path=path) for path in paths], seq_len=16, seed=1, document_masks=True)
    message = str(caught.value)
    assert message.startswith("5 problems with the data:")
    for part in (
        f"data.train.0: {tmp_path}/missing: no such folder",
        f"data.train.1: {tmp_path}/empty: empty: it holds 0 documents",
        "packed with seq_len=8, batch.seq_len=16 is asked for; set batch.seq_len to 8",
        f"data.train.3: {tmp_path}/foreign: not data to train on",
        "data.train: its sources were tokenized by different tokenizers: one with",
    ):
        assert part in message


@pytest.mark.parametrize("document_masks", [True, False])
@pytest.mark.parametrize("kind", ["pair", "concat", "best_fit"])
def test_a_source_without_any_label_is_refused(tmp_path, kind, document_masks):
    """Documents of one token have no next one; seen by itself, a document's neighbour is none."""

    def opened(sizes: Sequence[int]) -> list[Callable[[], object]]:
        documents, path = [np.full(size, 7) for size in sizes], tmp_path / f"{len(sizes)}"
        if kind == "pair":
            write_pair(path, documents)
        else:
            write_packed_folder(path, documents, seq_len=8, method=kind)
        sources, options = [SourceConfig(path=path)], {"seq_len": 8, "document_masks": document_masks}
        training = partial(open_samples, sources, seed=1, **options)
        validation = (partial(each, sources, **options) for each in (open_validation_samples, open_validation_sets))
        return [training, *validation]

    for open_it in opened([1] * 30):
        if document_masks:
            with pytest.raises(DataError, match=r"no label: none of its 30 documents has two tokens.*leave"):
                open_it()
        else:
            open_it()
    for open_it in opened([1]):
        with pytest.raises(DataError, match="no label: none of its 1 documents"):
            open_it()
    for open_it in opened([1] * 100 + [0, 2, 1]):
        open_it()


def test_no_source_is_refused():
    """An empty list names the setting."""
    with pytest.raises(DataError, match=r"data\.valid: no source is given"):
        open_validation_samples([], seq_len=8, document_masks=True)


def test_tokens_beyond_the_vocabulary_are_found_at_opening(tmp_path):
    """A folder whose record says 1,000 tokens but which holds number 1,500."""
    folder = write_tokens_folder(tmp_path / "tokens", [*DOCUMENTS, np.array([5, 1500, 2])])
    with pytest.raises(DataError, match="token id 1500 found, the vocabulary ends at 999"):
        open_one(folder)


def test_a_smaller_model_vocabulary_is_refused(tmp_path):
    """By the record where there is one, else by the tokens."""
    recorded = open_one(write_tokens_folder(tmp_path / "tokens", DOCUMENTS))
    bare = open_one(write_pair(tmp_path / "pair", DOCUMENTS))
    recorded.check_vocab_size(1000)
    bare.check_vocab_size(1000)
    with pytest.raises(DataError, match="tokenized with a vocabulary of 1000, the model has vocab_size=900"):
        recorded.check_vocab_size(900)
    with pytest.raises(DataError, match="the vocabulary ends at 899"):
        bare.check_vocab_size(900)


def test_another_tokenizer_than_the_datas_is_refused(tmp_path, tokenizer_folder):
    """Recorded by fingerprint; a bare pair is judged by its tokens."""
    tokenizer = Tokenizer.load(tokenizer_folder)
    path = write_tokens_folder(tmp_path / "own", [np.array([5, 2])], tokenizer=tokenizer.fingerprint, vocab_size=800)
    open_one(path).check_tokenizer(tokenizer)
    other = open_one(write_tokens_folder(tmp_path / "other", DOCUMENTS, tokenizer="another"))
    with pytest.raises(DataError, match=r"other: tokenized with .*, not with .*; set data\.tokenizer to null"):
        other.check_tokenizer(tokenizer)
    with pytest.raises(DataError, match="the vocabulary ends at 799"):
        open_one(write_pair(tmp_path / "pair", DOCUMENTS)).check_tokenizer(tokenizer)


def test_a_bad_token_that_the_scan_missed_is_found_when_it_is_read(tmp_path, monkeypatch):
    """The scan looks at part of a large stream; every sample is checked when it is used."""
    monkeypatch.setattr("megalite.data.vocabulary.largest_token", lambda tokens: 0)
    samples = open_one(write_tokens_folder(tmp_path / "tokens", [np.array([5, 1500, 2])]))
    with pytest.raises(DataError, match=r"tokens \(.*\): token id 1500 found in document 0, byte 2 of tokens\.bin"):
        samples.sample(0)


def test_packed_layout_maps_rather_than_reads(tmp_path):
    """Opening costs no memory for the index: the arrays are views of the files."""
    layout = PackedLayout(write_packed_folder(tmp_path / "packed", DOCUMENTS, seq_len=SEQ_LEN))
    assert isinstance(layout.pieces(0).starts.base, np.ndarray)
    assert not layout.pieces(0).starts.flags.owndata


def test_another_seq_len_needs_no_other_tokens(tmp_path):
    """One tokenized folder, packed for three lengths and read unpacked at a fourth: the same documents each time."""
    tokens = write_tokens_folder(tmp_path / "tokens", DOCUMENTS)
    before = {path.name: path.read_bytes() for path in tokens.iterdir()}
    for seq_len in (8, 16, 64):
        pack(tokens, tmp_path / str(seq_len), PackConfig(seq_len=seq_len))
    for path, seq_len in ((tmp_path / "8", 8), (tmp_path / "16", 16), (tmp_path / "64", 64), (tokens, 100)):
        rows = epoch_of(open_samples([SourceConfig(path=path)], seq_len=seq_len, seed=1, document_masks=True))
        inputs = np.concatenate([row.tokens[row.document_ids >= 0] for row in rows])
        assert sorted(inputs.tolist()) == sorted(np.concatenate(DOCUMENTS).tolist())
    assert {path.name: path.read_bytes() for path in tokens.iterdir()} == before


def test_stages_change_the_sources_at_their_border(tmp_path):
    """Tokens of the run become samples; the fingerprint follows the stages, and plain settings leave it alone."""
    configs = [SourceConfig(path=write_pair(tmp_path / name, DOCUMENTS)) for name in ("a", "b")]

    def opened(mix: MixSettings) -> Samples:
        return open_samples(configs, seq_len=SEQ_LEN, seed=1, document_masks=True, mix=mix)

    stages = (StageSettings(until_tokens=10 * SEQ_LEN - 3, weights={"a": 1}), StageSettings(weights={"b": 1}))
    samples = opened(MixSettings(stages=stages))
    assert samples.identities(0, 25)[:, 0].tolist() == [0] * 10 + [1] * 15
    assert samples.plan(25).samples == (10, 15)
    plain = open_samples(configs, seq_len=SEQ_LEN, seed=1, document_masks=True)
    assert opened(MixSettings()).fingerprint == plain.fingerprint
    later = (StageSettings(until_tokens=11 * SEQ_LEN, weights={"a": 1}), stages[1])
    assert len({samples.fingerprint, plain.fingerprint, opened(MixSettings(stages=later)).fingerprint}) == 3


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=40).filter(any),
    seq_len=st.integers(1, 24),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_stretches_of_samples_are_their_pieces(tmp_path_factory, lengths, seq_len, data):
    """Both layouts, any range, empty documents too: the pieces of a stretch are those of its samples one by one."""
    folder = tmp_path_factory.mktemp("data")
    pair = write_pair(folder / "pair", [np.full(length, 5) for length in lengths])
    pack(pair, folder / "packed", PackConfig(seq_len=seq_len))
    for layout in (ConcatLayout(IndexedTokens(pair), seq_len), PackedLayout(folder / "packed")):
        first = data.draw(st.integers(0, layout.num_samples - 1))
        stop = data.draw(st.integers(first + 1, layout.num_samples))
        cut = layout.stretch(first, stop)
        assert cut.borders[0] == 0
        assert cut.borders.size == stop - first + 1
        for number, (begin, end) in enumerate(pairwise(cut.borders.tolist())):
            for whole, own in zip(cut[1:], layout.pieces(first + number), strict=True):
                assert whole[begin:end].tolist() == own.tolist()
