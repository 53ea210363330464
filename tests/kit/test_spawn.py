"""Ranks that a signal ends say where they were."""

from __future__ import annotations

import ctypes

import pytest
import torch.distributed as dist

from tests.kit.spawn import RanksFailed, run_ranks


def end_in_a_library(function: str) -> None:
    """The second rank ends within C, as gloo or an allocator would have it end; the first waits for it."""
    if dist.get_rank() == 1:
        ctypes.CDLL(None)[function](*([0] if function == "strlen" else []))
    dist.barrier()


@pytest.mark.parametrize(("function", "signal"), [("abort", 6), ("strlen", 11)], ids=["abort", "bad address"])
def test_a_rank_that_a_signal_ends_leaves_its_stacks(function: str, signal: int):
    """Python's, with the function that was running, and the native one, with the library that was in it."""
    with pytest.raises(RanksFailed) as failed:
        run_ranks(end_in_a_library, 2, function)
    said = str(failed.value)
    assert f"died with exit code -{signal}\n" in said
    assert "in end_in_a_library" in said
    assert "libc.so" in said
    assert "_ctypes" in said
