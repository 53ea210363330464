"""Settings of all tests."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.kit.slow import slow_tests

gc.disable()  # until all tests are there: what is imported is no garbage


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz", type=int, default=200, help="cases of each kind in tests/fuzz")
    parser.addoption("--fuzz-seed", type=int, default=None, help="their seed [default: of the commit]")


def pytest_configure(config: pytest.Config) -> None:
    """What a shell starts in the background ignores Ctrl-C, and so would all that tests start and interrupt.

    A kernel for CPUs is built once, for all tests that compile a graph which has it, and without a pool of workers.
    What tests start has one thread: two of a tiny model wait for each other whenever another test has the second core,
    and it takes twenty times as long.
    """
    kernels = tempfile.TemporaryDirectory(prefix="kernels-")
    config.add_cleanup(kernels.cleanup)
    os.environ.update(TORCHINDUCTOR_CACHE_DIR=kernels.name, TORCHINDUCTOR_COMPILE_THREADS="1", OMP_NUM_THREADS="1")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = slow_tests()
    for item in items:
        if item.nodeid.split("[")[0] in slow:
            item.add_marker("slow")


def pytest_collection_finish() -> None:
    """What is there now stays, and is a million objects: no search for garbage has to look at them."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors are computed by one thread: with more, each small operation waits for a busy core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tokenizer_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small tokenizer of each kind, trained on half a megabyte of Python's library."""
    from megalite.corpus.corpus import Corpus
    from megalite.corpus.recipe import DocumentSource
    from megalite.corpus.stations.train_tokenizer import train_tokenizer
    from megalite.tokenizer.settings import TokenizerConfig
    from tests.kit.data import KINDS

    root = tmp_path_factory.mktemp("tokenizers")
    corpus = Corpus([DocumentSource(kind="python", max_mb=0.5)])
    for kind in KINDS:
        train_tokenizer(corpus, root / kind, TokenizerConfig(kind=kind, vocab_size=800))
    return {kind: root / kind for kind in KINDS}


@pytest.fixture(scope="session")
def tokenizer_folder(tokenizer_folders: dict[str, Path]) -> Path:
    """A small SentencePiece BPE tokenizer."""
    return tokenizer_folders["sentencepiece-bpe"]
