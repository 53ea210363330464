"""`.bin/.idx` pairs: Megatron's bytes, read by an independent parser and written by one, and every kind of damage."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from megalite.data.indexed import IndexedTokens, IndexedWriter
from megalite.errors import DataError
from megalite.tokenizer.tokenizer import token_dtype
from tests.kit.data import random_documents, write_pair


def parse_pair(prefix: Path) -> tuple[list[list[int]], list[int]]:
    """Sequences and document borders, read field by field as Megatron's format is described."""
    index = Path(f"{prefix}.idx").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    version, code, num_sequences, num_borders = struct.unpack_from("<QBQQ", index, 9)
    assert version == 1
    dtype = {4: "<i4", 8: "<u2"}[code]
    lengths = struct.unpack_from(f"<{num_sequences}i", index, 34)
    offsets = struct.unpack_from(f"<{num_sequences}q", index, 34 + 4 * num_sequences)
    borders = struct.unpack_from(f"<{num_borders}q", index, 34 + 12 * num_sequences)
    assert len(index) == 34 + 12 * num_sequences + 8 * num_borders
    data = Path(f"{prefix}.bin").read_bytes()
    sequences = [
        np.frombuffer(data, dtype, length, offset).tolist() for length, offset in zip(lengths, offsets, strict=True)
    ]
    return sequences, list(borders)


def write_megatron_pair(prefix: Path, sequences: list[list[int]], borders: list[int], code: int, dtype: str) -> None:
    """A pair as Megatron writes it, documents of several sequences included."""
    itemsize = np.dtype(dtype).itemsize
    lengths = [len(sequence) for sequence in sequences]
    offsets = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64) * itemsize if sequences else []
    Path(f"{prefix}.bin").write_bytes(np.concatenate([np.array(s, dtype) for s in sequences]).tobytes())
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(borders))
    body = struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(lengths)}q", *offsets)
    Path(f"{prefix}.idx").write_bytes(header + body + struct.pack(f"<{len(borders)}q", *borders))


@pytest.mark.parametrize(("vocab_size", "dtype"), [(1000, "uint16"), (65_499, "uint16"), (65_500, "int32")])
def test_an_independent_parser_reads_what_we_write(tmp_path, vocab_size, dtype):
    """Every field and token, with the type Megatron picks for the vocabulary."""
    assert token_dtype(vocab_size) == np.dtype(dtype)
    documents = random_documents(50)
    prefix = write_pair(tmp_path / "pair", documents, vocab_size)
    sequences, borders = parse_pair(prefix)
    assert sequences == [document.tolist() for document in documents]
    assert borders == list(range(51))


@pytest.mark.parametrize(("code", "dtype"), [(1, "u1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2")])
def test_we_read_what_megatron_writes(tmp_path, code, dtype):
    """Documents of several sequences, empty sequences and empty documents, in all integer types."""
    sequences = [[1, 2, 3], [4], [], [5, 6], [7, 8, 9, 10]]
    write_megatron_pair(tmp_path / "pair", sequences, [0, 2, 2, 4, 5], code, dtype)
    tokens = IndexedTokens(tmp_path / "pair")
    assert tokens.num_documents == 4
    assert np.diff(tokens.document_starts(0, tokens.num_documents + 1)).tolist() == [4, 0, 2, 4]
    assert tokens.read(0, tokens.num_tokens).tolist() == list(range(1, 11))
    assert [tokens.document_at(position) for position in range(10)] == [0] * 4 + [2] * 2 + [3] * 4
    assert tokens.document_starts(1, 5).tolist() == [4, 4, 6, 10]


def test_batches_of_documents_equal_single_ones(tmp_path):
    """How documents are handed to the writer leaves no trace."""
    documents = random_documents(20)
    one_by_one = write_pair(tmp_path / "single", documents)
    with IndexedWriter(tmp_path / "batch", token_dtype(1000)) as writer:
        writer.add(np.concatenate(documents), np.array([document.size for document in documents]))
    for suffix in (".bin", ".idx"):
        assert Path(f"{one_by_one}{suffix}").read_bytes() == (tmp_path / f"batch{suffix}").read_bytes()


def test_a_failed_writer_leaves_nothing(tmp_path):
    """No half pair under any name."""

    def fail() -> None:
        with IndexedWriter(tmp_path / "pair", token_dtype(1000)) as writer:
            writer.add(np.array([1, 2]), np.array([2]))
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_no_documents_is_a_pair_too(tmp_path):
    """An empty pair can be written and opened; refusing it is for those who need tokens."""
    tokens = IndexedTokens(write_pair(tmp_path / "pair", []))
    assert (tokens.num_documents, tokens.num_tokens) == (0, 0)
    assert np.diff(tokens.document_starts(0, tokens.num_documents + 1)).tolist() == []


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_file_that_changes_under_the_reader_is_found(tmp_path, suffix):
    """Shorter and longer; a pair that was renamed or replaced by its like is still whole in our hands."""
    prefix = write_pair(tmp_path / "pair", random_documents(5))
    path = Path(f"{prefix}{suffix}")
    tokens = IndexedTokens(prefix)
    tokens.check_unchanged()
    path.rename(f"{path}.old")
    path.write_bytes(b"another")
    tokens.check_unchanged()
    opened = Path(f"{path}.old")
    whole = opened.stat().st_size
    for size in (whole - 1, whole + 1):
        os.truncate(opened, size)
        with pytest.raises(DataError, match=rf"{suffix}: changed while it was read: {size} bytes now, {whole} when"):
            tokens.check_unchanged()
    os.truncate(opened, whole)
    tokens.check_unchanged()


def test_a_file_that_the_disk_has_lost_is_named(tmp_path):
    """A network disk answers ESTALE for a file that its server no longer has."""

    class LostMap:
        def size(self) -> int:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    tokens = IndexedTokens(write_pair(tmp_path / "pair", random_documents(5)))
    tokens._maps = {tmp_path / "pair.bin": LostMap()}
    with pytest.raises(DataError, match=r"pair\.bin: lost while it was read: Stale file handle"):
        tokens.check_unchanged()


def cut(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:-num_bytes])


DAMAGES = {
    "truncated bin": (lambda p: cut(p / "pair.bin", 10), r"pair\.bin: truncated: \d+ bytes found, \d+ expected"),
    "long bin": (lambda p: (p / "pair.bin").write_bytes(bytes(10_000)), r"pair\.bin: longer than its index: 10000"),
    "truncated idx": (lambda p: cut(p / "pair.idx", 4), r"pair\.idx: damaged index: \d+ bytes found, \d+ expected"),
    "cut header": (lambda p: (p / "pair.idx").write_bytes(b"MMIDIDX\x00\x00\x01"), "not a Megatron index"),
    "other file": (lambda p: (p / "pair.idx").write_bytes(b"PK" + bytes(100)), "not a Megatron index"),
    "no bin": (lambda p: (p / "pair.bin").unlink(), r"pair\.bin: no such file"),
    "no idx": (lambda p: (p / "pair.idx").unlink(), r"pair\.idx: no such file"),
    "version": (lambda p: patch(p / "pair.idx", 9, b"\x02"), "index version 2"),
    "floats": (lambda p: patch(p / "pair.idx", 17, b"\x07"), "dtype code 7 is no integer type"),
    "other dtype": (lambda p: patch(p / "pair.idx", 17, b"\x04"), "sequence 0 ends at byte"),
    "as long, other dtype": (lambda p: patch(p / "pair.idx", 17, b"\x05"), "sequence 0 ends at byte"),
    "negative length": (lambda p: patch(p / "pair.idx", 34 + 3, b"\xff"), r"damaged index: sequence 0 has -\d+ tokens"),
    "offset": (lambda p: patch(p / "pair.idx", 34 + 20 + 8, b"\x01"), "damaged index: sequence 0 ends at byte"),
    "first offset": (lambda p: patch(p / "pair.idx", 34 + 20, b"\x02"), "its first sequence begins at byte 2"),
    "falling borders": (lambda p: patch(p / "pair.idx", -16, b"\x09"), "document 4 ends before it begins"),
    "borders": (lambda p: patch(p / "pair.idx", -8, b"\x63"), "documents end at sequence 99 of 5"),
}


def patch(path: Path, at: int, value: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[at if at >= 0 else len(data) + at] = value[0]
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named(tmp_path, damage):
    """Each kind of damage is refused when the pair is opened, with the file and the sizes."""
    write_pair(tmp_path / "pair", random_documents(5))
    apply, message = DAMAGES[damage]
    apply(tmp_path)
    with pytest.raises(DataError, match=message):
        IndexedTokens(tmp_path / "pair")
