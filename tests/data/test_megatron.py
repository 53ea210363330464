"""Token pairs against Megatron-core's own IndexedDataset: it reads ours, and we read what it writes or joins."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

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


@pytest.mark.slow
def test_megatron_reads_what_we_write(tmp_path):
    """Types, every token, tails of sequences and the borders of documents; empty documents too."""
    need("megatron")
    documents = [np.array([0], np.int64), *random_documents(200), np.zeros(0, np.int64), *random_documents(50, seed=1)]
    prefixes = []
    for dtype, vocab_size in VOCAB_SIZES.items():
        largest = np.array([vocab_size - 1, 0])
        prefixes.append(write_pair(tmp_path / dtype, [*documents, largest], vocab_size))
    answers = ask("tests.data.megatron_pairs", {"write": [], "read": list(map(str, prefixes))})
    for (dtype, vocab_size), answer in zip(VOCAB_SIZES.items(), answers, strict=True):
        written = [document.tolist() for document in documents] + [[vocab_size - 1, 0]]
        assert answer["dtype"] == dtype == token_dtype(vocab_size).name
        assert answer["sequences"] == written
        assert answer["tails"] == [each[1:] for each in written if each]
        assert answer["borders"] == list(range(len(written) + 1))


@pytest.mark.slow
def test_we_read_what_megatron_writes(tmp_path):
    """All integer types; documents of several sequences, of an empty one and of none."""
    need("megatron")
    jobs = [
        {"prefix": str(tmp_path / dtype), "dtype": dtype, "documents": documents_of(largest)}
        for dtype, largest in DTYPES.items()
    ]
    ask("tests.data.megatron_pairs", {"write": jobs, "read": []})
    for job in jobs:
        assert_reads(Path(job["prefix"]), job["dtype"], job["documents"])


@pytest.mark.slow
def test_megatron_joins_ours_to_its_own(tmp_path):
    """Its merge of two pairs, one of them ours, gives the documents of both."""
    need("megatron")
    own = random_documents(30)
    prefix = write_pair(tmp_path / "ours", own)
    documents = documents_of(999)
    job = {"prefix": str(tmp_path / "joined"), "dtype": "uint16", "documents": documents, "then": [str(prefix)]}
    ask("tests.data.megatron_pairs", {"write": [job], "read": []})
    assert_reads(tmp_path / "joined", "uint16", [*documents, *([each.tolist()] for each in own)])


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
