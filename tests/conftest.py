"""Settings of all tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz", type=int, default=200, help="cases of each kind in tests/fuzz")
    parser.addoption("--fuzz-seed", type=int, default=None, help="their seed [default: of the commit]")


def pytest_configure() -> None:
    """What a shell starts in the background ignores Ctrl-C, and so would all that tests start and interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors are computed by one thread: with more, each small operation waits for a busy core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
