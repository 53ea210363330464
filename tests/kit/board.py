"""Memory that the ranks of one group share: each posts what all may read, number after number.

    posted [size]      how many posts each rank has made         \
    taken  [size]      how many posts each rank has read           one cache line each
    sent   [size]      how many messages each rank has sent, see `memory_group`
    slots  [size, 2]   what a rank has posted last, and before that

A slot is written again two posts later, once all have taken what was in it, so nobody waits for the slowest reader. All
ranks make the same posts in the same order. x86 makes a rank's writes visible in the order in which they were made; on
other machines the lock that Python takes around each call does. Who waits for a number sleeps in the kernel until it
changes (a futex), since ranks and other tests share the cores.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

SLOT_BYTES = 1 << 20
LINE_BYTES = 64

COUNTERS = 3
"""Kinds of numbers on a board."""

FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine()) if sys.platform == "linux" else None
"""Number of the system call."""
FUTEX_WAIT, FUTEX_WAKE, EVERYBODY = 0, 1, 2**31 - 1
NAP_SECONDS = 0.25
"""A rank that sleeps looks again after this long, whatever it hears."""
NAP_WITHOUT_FUTEX_SECONDS = 5e-5

_call = ctypes.CDLL(None).syscall


class Board:
    """One group's memory, as one of its ranks sees it.

    Args:
        path: an existing file of `board_bytes(size)` bytes, which may go once all have opened it.
        rank: of this rank in the group.
        size: of the group.
        timeout_seconds: waiting for longer is an error.
    """

    def __init__(self, path: Path, rank: int, size: int, timeout_seconds: float):
        self.rank, self.size = rank, size
        with open(path, "r+b") as file:
            shared = mmap.mmap(file.fileno(), board_bytes(size))
        lines = np.frombuffer(shared, np.int32, COUNTERS * size * LINE_BYTES // 4).reshape(COUNTERS, size, -1)
        counters = [[Counter(line[:1], timeout_seconds) for line in kind] for kind in lines]
        self._posted, self._taken, self._sent = counters
        slots = np.frombuffer(shared, np.uint8, offset=COUNTERS * size * LINE_BYTES)
        self._slots = slots.reshape(size, 2, SLOT_BYTES)  # no tensor: tests count those
        self._number = 0

    def post(self, content: Tensor | None) -> None:
        """Begin the next post, with at most `SLOT_BYTES` bytes `[n]` uint8, or nothing."""
        self._number += 1
        for taken in self._taken:
            taken.wait_for(self._number - 2)
        if content is not None:
            slot = torch.from_numpy(self._slots[self.rank, self._number % 2, : content.numel()])
            slot.copy_(content)  # no `content.numpy()`, after which FSDP2 cannot free its storage
        self._posted[self.rank].set(self._number)

    def read(self, rank: int, num_bytes: int) -> Tensor:
        """What a rank has posted, `[num_bytes]` uint8: valid until `release`."""
        self._posted[rank].wait_for(self._number)
        return torch.from_numpy(self._slots[rank, self._number % 2, :num_bytes])

    def release(self) -> None:
        """Everything of this post is read."""
        self._taken[self.rank].set(self._number)

    def has_sent(self) -> None:
        """A message of this rank is there."""
        mine = self._sent[self.rank]
        mine.set(mine.get() + 1)

    def wait_for_message(self, source: int, is_there: Callable[[], bool]) -> None:
        """Wait until a message of a rank, whichever it has sent before, is there."""
        sent, begin = self._sent[source], time.monotonic()
        while True:
            before = sent.get()
            if is_there():
                return
            sent.wait_while(before, begin)


class Counter:
    """A number in shared memory, which one rank writes and others wait for.

    Args:
        place: `[1]` int32.
        timeout_seconds: waiting for longer is an error.
    """

    def __init__(self, place: np.ndarray, timeout_seconds: float):
        self._place, self._address, self._timeout = place, ctypes.c_void_p(place.ctypes.data), timeout_seconds

    def get(self) -> int:
        return int(self._place[0])

    def set(self, number: int) -> None:
        """Say a number to all that wait for it."""
        self._place[0] = number
        if FUTEX is not None:
            _call(FUTEX, self._address, FUTEX_WAKE, EVERYBODY, None, None, 0)

    def wait_for(self, number: int) -> None:
        """Wait until it is that or more."""
        if self._place[0] >= number:
            return
        begin = time.monotonic()
        while (now := self.get()) < number:
            self.wait_while(now, begin)

    def wait_while(self, number: int, begin: float) -> None:
        """Sleep until it is another number, or for a while.

        Raises:
            TimeoutError: waiting has begun too long ago.
        """
        if time.monotonic() - begin > self._timeout:
            raise TimeoutError(f"another rank is not there after {self._timeout:.0f} s")
        if FUTEX is None:
            time.sleep(NAP_WITHOUT_FUTEX_SECONDS)
        else:
            _call(FUTEX, self._address, FUTEX_WAIT, ctypes.c_int(number), ctypes.byref(_NAP), None, 0)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_NAP = _Timespec(0, int(NAP_SECONDS * 1e9))


def board_bytes(size: int) -> int:
    """Bytes of the file for a group."""
    return size * (COUNTERS * LINE_BYTES + 2 * SLOT_BYTES)
