"""Memory that the ranks of one group share: each posts what all may read, number after number.

    posted [size]      how many posts each rank has made         \
    taken  [size]      how many posts each rank has read           one cache line each
    slots  [size, 2]   what a rank has posted last, and before that

A slot is written again two posts later, once all have taken what was in it, so nobody waits for the slowest reader. All
ranks make the same posts in the same order. x86 makes a rank's writes visible in the order in which they were made; on
other machines the lock that Python takes around each call does.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

SLOT_BYTES = 1 << 20
LINE_BYTES = 64

SPINS = 200
"""Turns that a waiting rank gives away before it sleeps: ranks may be more than cores."""
NAP_SECONDS = 5e-5


class Board:
    """One group's memory, as one of its ranks sees it.

    Args:
        path: an existing file of `board_bytes(size)` bytes, which may go once all have opened it.
        rank: of this rank in the group.
        size: of the group.
        timeout_seconds: waiting for longer is an error.
    """

    def __init__(self, path: Path, rank: int, size: int, timeout_seconds: float):
        self.rank, self.size, self._timeout = rank, size, timeout_seconds
        with open(path, "r+b") as file:
            shared = mmap.mmap(file.fileno(), board_bytes(size))
        lines = np.frombuffer(shared, np.int64, 2 * size * LINE_BYTES // 8).reshape(2, size, -1)
        self._posted, self._taken = lines[0, :, 0], lines[1, :, 0]
        slots = np.frombuffer(shared, np.uint8, offset=2 * size * LINE_BYTES)
        self._slots = slots.reshape(size, 2, SLOT_BYTES)  # no tensor: tests count those
        self._number = 0

    def post(self, content: Tensor | None) -> None:
        """Begin the next post, with at most `SLOT_BYTES` bytes `[n]` uint8, or nothing."""
        self._number += 1
        self._wait(self._taken, self._number - 2)
        if content is not None:
            self._slots[self.rank, self._number % 2, : content.numel()] = content.numpy()
        self._posted[self.rank] = self._number

    def read(self, rank: int, num_bytes: int) -> Tensor:
        """What a rank has posted, `[num_bytes]` uint8: valid until `release`."""
        self._wait(self._posted[rank : rank + 1], self._number)
        return torch.from_numpy(self._slots[rank, self._number % 2, :num_bytes])

    def release(self) -> None:
        """Everything of this post is read."""
        self._taken[self.rank] = self._number

    def _wait(self, counters: np.ndarray, number: int) -> None:
        wait_until(lambda: bool(counters.min() >= number), self._timeout)


def wait_until(is_there, timeout_seconds: float) -> None:
    """Wait for another rank, giving it the core."""
    turns = 0
    while not is_there():
        turns += 1
        if turns < SPINS:
            os.sched_yield()
        elif turns * NAP_SECONDS < timeout_seconds:
            time.sleep(NAP_SECONDS)
        else:
            raise TimeoutError(f"another rank is not there after {timeout_seconds:.0f} s")


def board_bytes(size: int) -> int:
    """Bytes of the file for a group."""
    return 2 * size * (LINE_BYTES + SLOT_BYTES)
