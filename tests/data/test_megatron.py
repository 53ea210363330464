"""Token pairs against Megatron-core's own IndexedDataset: it reads ours, and we read what it writes or joins."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from megalite.data.indexed import IndexedTokens, bin_path, idx_path
from megalite.tokenizer.tokenizer import token_dtype
from tests.kit.child import ask, need
from tests.kit.data import random_documents, write_pair

VOCAB_SIZES = {"uint16": 65_499, "int32": 65_500}
"""On both sides of the border at which Megatron changes the type."""

DTYPES = {"uint8": 255, "int8": 127, "int16": 32_767, "int32": 2**31 - 1, "int64": 2**31, "uint16": 65_499}
"""All integer types of the format, with a large token of each."""


def documents_of(largest: int) -> list[list[list[int]]]:
    """Documents of one sequence, of several, of an empty one and of none."""
    return [[[1, 2, largest]], [[3], [4, 5], [6]], [[]], [], [[7, 8], []], [[largest]]]


class Answers(NamedTuple):
    """What Megatron found in pairs of ours, and the pairs that it wrote."""

    ours: list[list[list[int]]]
    """The documents of each of our pairs, by VOCAB_SIZES."""
    found: list[dict[str, Any]]
    written: list[dict[str, Any]]
    joined: dict[str, Any]
    then: list[np.ndarray]
    """Documents of ours that it joined to its own."""


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> Answers:
    """One process of Megatron reads, writes and joins for all tests: it takes seconds to begin."""
    need("megatron")
    folder = tmp_path_factory.mktemp("pairs")
    documents = [np.array([0], np.int64), *random_documents(200), np.zeros(0, np.int64), *random_documents(50, seed=1)]
    prefixes, ours = [], []
    for dtype, vocab_size in VOCAB_SIZES.items():
        whole = [*documents, np.array([vocab_size - 1, 0])]
        prefixes.append(str(write_pair(folder / "ours" / dtype, whole, vocab_size)))
        ours.append([document.tolist() for document in whole])
    written = [
        {"prefix": str(folder / dtype), "dtype": dtype, "documents": documents_of(largest)}
        for dtype, largest in DTYPES.items()
    ]
    then = random_documents(30)
    prefix = write_pair(folder / "then", then)
    joined = {
        "prefix": str(folder / "joined"),
        "dtype": "uint16",
        "documents": documents_of(999),
        "then": [str(prefix)],
    }
    found = ask("tests.data.megatron_pairs", {"write": [*written, joined], "read": prefixes})
    return Answers(ours, found, written, joined, then)


def test_megatron_reads_what_we_write(answers):
    """Types, every token, tails of sequences and the borders of documents; empty documents too."""
    for (dtype, vocab_size), answer, written in zip(VOCAB_SIZES.items(), answers.found, answers.ours, strict=True):
        assert answer["dtype"] == dtype == token_dtype(vocab_size).name
        assert answer["sequences"] == written
        assert answer["tails"] == [each[1:] for each in written if each]
        assert answer["borders"] == list(range(len(written) + 1))


def test_we_read_what_megatron_writes(answers):
    """All integer types; documents of several sequences, of an empty one and of none."""
    for job in answers.written:
        assert_reads(Path(job["prefix"]), job["dtype"], job["documents"])


def test_megatron_joins_ours_to_its_own(answers):
    """Its merge of two pairs, one of them ours, gives the documents of both."""
    job = answers.joined
    assert_reads(Path(job["prefix"]), job["dtype"], [*job["documents"], *([each.tolist()] for each in answers.then)])


def assert_reads(prefix: Path, dtype: str, documents: list[list[list[int]]]) -> None:
    """We find these documents in a pair."""
    assert bin_path(prefix).is_file()
    assert idx_path(prefix).is_file()
    tokens = IndexedTokens(prefix)
    whole = [[token for sequence in sequences for token in sequence] for sequences in documents]
    assert tokens.dtype == np.dtype(dtype)
    assert tokens.num_documents == len(documents)
    assert np.diff(tokens.document_starts(0, tokens.num_documents + 1)).tolist() == list(map(len, whole))
    starts = tokens.document_starts(0, len(documents) + 1).tolist()
    found = [tokens.read(start, stop).tolist() for start, stop in pairwise(starts)]
    assert found == whole
    assert tokens.num_tokens == sum(map(len, whole))
