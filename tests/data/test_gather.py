"""The compiled reader of samples: against plain numpy, against hashes of earlier runs, and over damaged indices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.config.schema import SourceConfig
from megalite.data.indexed import IndexedTokens
from megalite.data.layout import BORDERS_FILE, DOCUMENTS_FILE, LENGTHS_FILE, STARTS_FILE, ConcatLayout, PackedLayout
from megalite.data.pack import pack
from megalite.data.sample import NO_DOCUMENT, NO_TOKEN, DocumentPieces, Sample
from megalite.data.samples import Samples, open_samples, open_validation_samples
from megalite.data.settings import PackConfig
from megalite.errors import DataError
from tests.data.golden import fixed_documents, hash_of
from tests.data.test_indexed import write_megatron_pair
from tests.kit.data import VOCAB_SIZE, random_documents, write_packed_folder, write_pair

SEQ_LEN = 16
DOCUMENTS = random_documents(60, longest=40)


def assemble(
    tokens: IndexedTokens,
    pieces: DocumentPieces,
    seq_len: int,
    *,
    document_masks: bool,
    stream_goes_on: bool,
    weighted: bool = False,
    loss_weight: float = 1.0,
) -> Sample:
    """What the kernel must give, piece by piece in numpy.

    `stream_goes_on`: without masks, the token behind the last one is its label even in another document.
    """
    filled = int(pieces.lengths.sum())
    ids = np.full(seq_len + 1, NO_TOKEN, dtype=np.int64)
    document_ids = np.full(seq_len, NO_DOCUMENT, dtype=np.int64)
    positions = np.arange(seq_len, dtype=np.int64)
    loss_mask = np.zeros(seq_len, dtype=np.bool_)
    loss_mask[: filled - 1] = True

    place = 0
    for start, length, document in zip(*(column.tolist() for column in pieces), strict=True):
        ids[place : place + length] = tokens.read(start, start + length)
        document_ids[place : place + length] = document
        if document_masks:
            positions[place : place + length] = np.arange(length)
            loss_mask[place + length - 1] = False
        place += length
    if document_masks:
        positions[filled:] -= filled

    labels = ids[1:].copy()
    following = int(pieces.starts[-1] + pieces.lengths[-1])
    if following < tokens.num_tokens:
        same_document = tokens.document_at(following) == pieces.documents[-1]
        if same_document or (stream_goes_on and not document_masks):
            labels[filled - 1] = tokens.read(following, following + 1)[0]
            loss_mask[filled - 1] = True
    weights = None
    if weighted:
        stream = np.append(tokens.read_weights(0, tokens.num_tokens), np.float32(0))
        weights = np.zeros(seq_len, np.float32)
        ends = np.concatenate([start + 1 + np.arange(length) for start, length in zip(*pieces[:2], strict=True)])
        ends[np.cumsum(pieces.lengths)[:-1] - 1] = pieces.starts[1:]  # across a border, where masks allow
        weights[:filled] = stream[ends] * loss_weight
        weights[~loss_mask] = 0
        loss_mask &= weights != 0
    labels[~loss_mask] = NO_TOKEN
    return Sample(ids[:-1], labels, loss_mask, document_ids, positions, weights)


def assert_rows_equal_the_reference(samples: Samples) -> None:
    """Two epochs in one call, rows of several sources mixed, against `assemble`."""
    places = samples.identities(0, 2 * samples.num_samples_per_epoch)
    rows = samples.read(places, document_ids=True)
    assert samples.read(places).document_ids.size == 0
    for row, (number, _, position) in enumerate(places.tolist()):
        source = samples.sources[number]
        expected = assemble(
            source.tokens,
            source.layout.pieces(position),
            samples.seq_len,
            document_masks=samples.document_masks,
            stream_goes_on=isinstance(source.layout, ConcatLayout),
            weighted=samples.is_weighted,
            loss_weight=np.float32(source.loss_weight),
        )
        for name, values in vars(expected).items():
            if values is None:
                assert getattr(rows, name).size == 0
                continue
            found = getattr(rows, name)[row]
            assert found.dtype == values.dtype
            assert found.tolist() == values.tolist(), (name, row)


@contextmanager
def unseen_at_opening() -> Iterator[None]:
    """Open files of which nothing can be learnt; and damaged ones, as if that came later or lay where none looks."""
    with (
        patch("megalite.data.sources.check_sampled_bytes", lambda *_: None),
        patch.object(PackedLayout, "damage", lambda *_, **__: ""),
        patch.object(IndexedTokens, "damage", lambda *_, **__: ""),
        patch.object(IndexedTokens, "has_label", lambda _: True),
    ):
        yield


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=40).filter(any),
    seq_len=st.integers(1, 24),
    masks=st.booleans(),
    wide=st.booleans(),
    seed=st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_kernel_equals_the_plain_reading(tmp_path_factory, lengths, seq_len, masks, wide, seed):
    """Any documents, empty ones and cut ones too, both layouts, 2 and 4 bytes a token, with and without masks."""
    rng = np.random.default_rng(seed)
    documents = [rng.integers(3, VOCAB_SIZE, length) for length in lengths]
    folder = tmp_path_factory.mktemp("data")
    pair = write_pair(folder / "pair", documents, vocab_size=100_000 if wide else VOCAB_SIZE)
    pack(pair, folder / "packed", PackConfig(seq_len=seq_len))
    configs = [SourceConfig(path=folder / "packed", weight=2), SourceConfig(path=pair)]
    with unseen_at_opening():
        samples = open_samples(configs, seq_len=seq_len, seed=seed, document_masks=masks)
    assert_rows_equal_the_reference(samples)


WEIGHTS = [0.0, 0.0, 1.0, 1.0, 0.3, 6.5, 6.103515625e-05, 1024.0]


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=40).filter(lambda found: max(found) > 1),
    seq_len=st.integers(1, 24),
    masks=st.booleans(),
    method=st.sampled_from(["best_fit", "concat"]),
    seed=st.integers(0, 3),
)
@settings(max_examples=40, deadline=None)
def test_labels_weigh_what_the_file_says(tmp_path_factory, lengths, seq_len, masks, method, seed):
    """Loss weights of tokens, beside a plain source that has none and is weighed as a whole: labels of weight 0 are
    none, in both layouts, with documents that are cut and without masks."""
    rng = np.random.default_rng(seed)
    documents = [rng.integers(3, VOCAB_SIZE, length) for length in lengths]
    weights = [rng.choice(WEIGHTS, length).astype(np.float16) for length in lengths]
    folder = tmp_path_factory.mktemp("data")
    write_packed_folder(folder / "packed", documents, seq_len=seq_len, method=method, weights=weights)
    pair = write_pair(folder / "pair", random_documents(20, seed=seed))
    configs = [SourceConfig(path=folder / "packed"), SourceConfig(path=pair, loss_weight=0.7)]
    with unseen_at_opening():
        samples = open_samples(configs, seq_len=seq_len, seed=seed, document_masks=masks)
    assert samples.is_weighted
    assert_rows_equal_the_reference(samples)


def test_weights_are_other_data(tmp_path):
    """Fingerprints, by which a run knows its data, change with a token's weight and with a source's."""
    documents = random_documents(20)
    seen = set()
    for name, weight in (("plain", None), ("ones", 1.0), ("halves", 0.5)):
        weights = None if weight is None else [np.full(each.size, weight, np.float16) for each in documents]
        folder = write_packed_folder(tmp_path / name, documents, seq_len=SEQ_LEN, weights=weights)
        for loss_weight in (1.0, 2.0):
            config = SourceConfig(path=folder, loss_weight=loss_weight)
            samples = open_samples([config], seq_len=SEQ_LEN, seed=1, document_masks=True)
            seen.add(samples.fingerprint)
    assert len(seen) == 6


def test_weights_that_are_not_there_or_all_0_are_refused(tmp_path):
    """By name, when the data is opened; so are conversations that nobody has packed."""
    documents = random_documents(20)
    zeros = [np.zeros(each.size, np.float16) for each in documents]
    folder = write_packed_folder(tmp_path / "packed", documents, seq_len=SEQ_LEN, weights=zeros)
    tokens = tmp_path / "packed-tokens"
    messages = {folder: "no label: every loss weight is 0", tokens: "conversations that are not packed"}
    for path, message in messages.items():
        with pytest.raises(DataError, match=message):
            open_samples([SourceConfig(path=path)], seq_len=SEQ_LEN, seed=1, document_masks=True)
    (tokens / "tokens.weights").unlink()
    with pytest.raises(DataError, match=r"tokens\.weights"):
        open_samples([SourceConfig(path=folder)], seq_len=SEQ_LEN, seed=1, document_masks=True)


@pytest.mark.parametrize("masks", [True, False])
def test_kernel_reads_documents_of_several_sequences(tmp_path, masks):
    """A pair as Megatron may write it: documents of several sequences, empty sequences and empty documents."""
    sequences = [[11, 12, 13], [14], [], [15, 16], [17, 18, 19, 20]]
    write_megatron_pair(tmp_path / "pair", sequences, [0, 2, 2, 4, 5], 4, "<i4")
    for seq_len in (1, 3, 4, 7, 30):
        configs = [SourceConfig(path=tmp_path / "pair")]
        assert_rows_equal_the_reference(open_samples(configs, seq_len=seq_len, seed=1, document_masks=masks))


GOLDEN = {
    ("best_fit", True, 1): ("0313a1bb522e2a14", "5f8d61a8cfff9e1d", "8a62a49fde10a5e119282d4a23d20185"),
    ("best_fit", True, 2): ("5e372c96c6517d6b", "55603455a9370d02", "bce789bbd529ce24de848a382ead9eb0"),
    ("best_fit", True, 1234): ("0a6eb425496178a9", "66cfec1c2ab0169c", "a998f05e07c9547ac37f53475fecdf54"),
    ("best_fit", False, 1): ("5b5946752379a224", "5f8d61a8cfff9e1d", "95a75f537322cea8e697b95c9cbabc16"),
    ("best_fit", False, 2): ("f2a7965f8b48335c", "55603455a9370d02", "f6ebf67f9db1faf3ff98b3f10227c41f"),
    ("best_fit", False, 1234): ("817f2d49a263a061", "66cfec1c2ab0169c", "5ad0cc15f8952d8b26e24716bb0ef6e2"),
    ("concat", True, 1): ("1f07ae010075f135", "1561a7b5140cefe7", "9368228449c51a9d692b95fa94a341d6"),
    ("concat", True, 2): ("be072a655d2e067c", "b4a32b12a59ab7e8", "99bff1bb5531c21df215067a2f17d3ff"),
    ("concat", True, 1234): ("a00ce85fb13416bb", "368a07c21463e6da", "994215a2552a1d2ceaa0f8388ec0567e"),
    ("concat", False, 1): ("3e067f708fe20b2c", "1561a7b5140cefe7", "3c9b0e6cfa59ca26acf7994b9c46fbd8"),
    ("concat", False, 2): ("5e1100f1fa80e7e1", "b4a32b12a59ab7e8", "ec8ae904332f1ed7a8759139bd466fe3"),
    ("concat", False, 1234): ("c4ea2a935c2fdbfd", "368a07c21463e6da", "c61b18d9ea9fb3ca5490a398eccd25da"),
    ("best_fit", True, None): ("69fcf135ba3ba233", None, "d5fbc02c93ee2b194d7235b8280e77ce"),
    ("best_fit", False, None): ("dfaebb3da96386fb", None, "e536bd8cc05caf0b4246dc008ec451a2"),
    ("concat", True, None): ("3c325f51a0f95a00", None, "21826d7e6165981d6d9642dfcd8c4770"),
    ("concat", False, None): ("0fc8cd8118a32ab0", None, "4fb36f930b6402d07c8496578d227a3f"),
}
"""Hash of the samples, hash of their order, and the fingerprint that a checkpoint keeps, of a packed source beside two
pairs; seed None is validation. They were taken before there was a compiled reader."""


@pytest.fixture(scope="module")
def golden_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("golden")
    for method in ("best_fit", "concat"):
        write_packed_folder(folder / f"{method}16", fixed_documents(300), seq_len=16, method=method)
    write_pair(folder / "pair", fixed_documents(100, 5))
    write_pair(folder / "wide", fixed_documents(40, 9), vocab_size=70_000)
    return folder


@pytest.mark.parametrize(("method", "masks", "seed"), GOLDEN)
def test_golden_samples(golden_folder, method, masks, seed):
    """Contents, order and fingerprint are those of runs from before: such a run goes on where it was."""
    configs = [
        SourceConfig(path=golden_folder / f"{method}16", weight=3),
        SourceConfig(path=golden_folder / "pair"),
        SourceConfig(path=golden_folder / "wide", weight=0.3),
    ]
    if seed is None:
        samples = open_validation_samples(configs, seq_len=16, document_masks=masks)
        rows = [samples.sample(index) for index in range(samples.num_samples_per_epoch)]
    else:
        samples = open_samples(configs, seq_len=16, seed=seed, document_masks=masks)
        rows = [samples.sample(index) for index in range(2 * samples.num_samples_per_epoch)]
    names = ("tokens", "labels", "loss_mask", "document_ids", "positions")
    contents = hash_of(*(np.stack([getattr(row, name) for row in rows]) for name in names))
    order = None if seed is None else hash_of(samples.identities(0, len(rows)))
    assert (contents, order, samples.fingerprint) == GOLDEN[method, masks, seed]


def overwrite(path: Path, index: int, value: int) -> None:
    """Change one number of a .npy file, its size as it was."""
    values = np.load(path)
    values[index] = value
    np.save(path, values)


DAMAGED_INDEX = {
    "behind the stream": (STARTS_FILE, 10**9),
    "before the stream": (STARTS_FILE, -5),
    "longer than a sequence": (LENGTHS_FILE, 1000),
    "no length": (LENGTHS_FILE, 0),
    "no document": (DOCUMENTS_FILE, 60),
    "borders before the pieces": (BORDERS_FILE, -3),
}


@pytest.mark.parametrize("damage", DAMAGED_INDEX)
def test_a_damaged_piece_is_refused_not_followed(tmp_path, damage):
    """At opening; and where that did not see it, by the kernel, which looks at every piece before it reads."""
    folder = write_packed_folder(tmp_path / "packed", DOCUMENTS, seq_len=SEQ_LEN)
    name, value = DAMAGED_INDEX[damage]
    overwrite(folder / name, 0, value)
    with pytest.raises(DataError, match=f"{name}: its contents have changed"):
        open_validation_samples([SourceConfig(path=folder)], seq_len=SEQ_LEN, document_masks=True)
    with unseen_at_opening():
        samples = open_validation_samples([SourceConfig(path=folder)], seq_len=SEQ_LEN, document_masks=True)
    with pytest.raises(DataError, match=r"damaged index: a piece of sample \[0\] lies outside its"):
        samples.sample(0)
    assert samples.sample(5).tokens.any()


def test_a_sample_without_a_piece_is_refused(tmp_path):
    """Two equal borders; packing never leaves a sequence empty."""
    folder = write_packed_folder(tmp_path / "packed", DOCUMENTS, seq_len=SEQ_LEN)
    overwrite(folder / BORDERS_FILE, 1, 0)
    with unseen_at_opening():
        samples = open_validation_samples([SourceConfig(path=folder)], seq_len=SEQ_LEN, document_masks=True)
    with pytest.raises(DataError, match="damaged index"):
        samples.sample(0)


@given(
    offsets=st.lists(st.integers(-100, 100) | st.integers(-(2**63), 2**63 - 1), min_size=3, max_size=3),
    borders=st.lists(st.integers(-3, 8) | st.integers(-(2**63), 2**63 - 1), min_size=3, max_size=3),
)
@settings(max_examples=100, deadline=None)
def test_a_damaged_index_of_documents_ends_in_an_error_or_in_tokens(tmp_path_factory, offsets, borders):
    """Any numbers inside the index of four documents: no read outside the file, and no walk without end."""
    prefix = write_pair(tmp_path_factory.mktemp("data") / "pair", [np.full(8, 5) for _ in range(4)])
    index = Path(f"{prefix}.idx")
    data = bytearray(index.read_bytes())
    data[34 + 16 : 34 + 40] = np.array(offsets, "<i8").tobytes()
    data[34 + 56 : 34 + 80] = np.array(borders, "<i8").tobytes()
    index.write_bytes(bytes(data))
    with unseen_at_opening():
        samples = open_validation_samples([SourceConfig(path=prefix)], seq_len=3, document_masks=True)
    complaints, tokens = [], set()
    for number in range(samples.num_samples_per_epoch):
        try:
            tokens |= set(samples.read(np.array([[0, 0, number]])).tokens.ravel().tolist())
        except DataError as error:
            complaints.append(str(error))
    assert all("damaged index" in text for text in complaints)
    assert tokens <= {NO_TOKEN, 5}


@pytest.mark.parametrize("method", ["best_fit", "concat"])
def test_a_token_below_zero_is_refused(tmp_path, method):
    """A flipped sign in a file of a signed type would be read as a row from the end of the embedding."""
    documents = [np.arange(3, 40), np.arange(3, 20)]
    pair = write_pair(tmp_path / "pair", documents, vocab_size=100_000)
    pack(pair, tmp_path / "packed", PackConfig(seq_len=SEQ_LEN, method=method))
    tokens = np.fromfile(f"{pair}.bin", np.int32)
    tokens[5] = -7
    tokens.tofile(f"{pair}.bin")
    samples = open_validation_samples([SourceConfig(path=tmp_path / "packed")], seq_len=SEQ_LEN, document_masks=True)
    with pytest.raises(DataError, match=r"pair\.bin: damaged: token -7 found"):
        samples.check_vocab_size(100_000)
    with pytest.raises(DataError, match=r"is below 0; its \.bin file is damaged"):
        samples.read(np.array([[0, 0, number] for number in range(samples.num_samples_per_epoch)]))
