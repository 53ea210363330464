"""Tokenizers, trained once for all tests of the data tools."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalite.data.corpus import Corpus
from megalite.data.recipe import DocumentSource, TokenizerConfig
from megalite.data.train_tokenizer import train_tokenizer
from tests.data.factory import KINDS


@pytest.fixture(scope="session")
def tokenizer_folders(tmp_path_factory) -> dict[str, Path]:
    """A small tokenizer of each kind, trained on half a megabyte of Python's library."""
    root = tmp_path_factory.mktemp("tokenizers")
    corpus = Corpus([DocumentSource(kind="python", max_mb=0.5)])
    for kind in KINDS:
        train_tokenizer(corpus, root / kind, TokenizerConfig(kind=kind, vocab_size=800))
    return {kind: root / kind for kind in KINDS}


@pytest.fixture(scope="session")
def tokenizer_folder(tokenizer_folders) -> Path:
    """A small SentencePiece BPE tokenizer."""
    return tokenizer_folders["sentencepiece-bpe"]
