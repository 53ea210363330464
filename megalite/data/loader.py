"""Batches for one data-parallel rank: samples laid end to end as one stream of tokens, read ahead by a thread.

    step s uses global samples [(s - 1) x G, s x G)
    micro-batch a of dp rank r holds offsets (a x dp + r) x m + [0, m) of those       (G = a x dp x m)

The thread only reads and copies, which releases the interpreter lock for the larger part, so a process a loader would
bring nothing but a copy of every batch.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
import torch

from megalite.data.sample import Sample
from megalite.data.samples import Samples
from megalite.errors import DataError

POLL_SECONDS = 0.1
"""How often the reading thread looks whether it is to stop while the queue is full."""


@dataclass
class Batch:
    """One micro-batch as a stream of t = micro_batch_size x seq_len tokens."""

    tokens: torch.Tensor
    """[t] int64"""
    labels: torch.Tensor
    """[t] int64; 0 where loss_mask is False."""
    loss_mask: torch.Tensor
    """[t] bool"""
    positions: torch.Tensor
    """[t] int64"""
    cu_seqlens: torch.Tensor
    """[n + 1] int32: borders of the n spans that attend within themselves: documents, or sequences without masks."""
    max_seqlen: int
    """Tokens in the longest span."""
    keys: torch.Tensor
    """[t] int64: global sample index x seq_len + place in the sequence; a token's name in every layout."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """A copy on `device`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return Batch(
            **{
                name: value.to(device, non_blocking=non_blocking) if isinstance(value, torch.Tensor) else value
                for name, value in values.items()
            }
        )


def make_batch(samples: Samples, start: int, micro_batch_size: int) -> Batch:
    """Read global samples start..start + micro_batch_size - 1 as one stream.

    Raises:
        DataError: a sample cannot be read; the message names its source and number.
    """
    rows = [_read(samples, index) for index in range(start, start + micro_batch_size)]
    positions = np.concatenate([row.positions for row in rows])
    borders = np.append(np.flatnonzero(positions == 0), positions.size).astype(np.int32)
    keys = np.arange(start * samples.seq_len, (start + micro_batch_size) * samples.seq_len, dtype=np.int64)
    return Batch(
        tokens=torch.from_numpy(np.concatenate([row.tokens for row in rows])),
        labels=torch.from_numpy(np.concatenate([row.labels for row in rows])),
        loss_mask=torch.from_numpy(np.concatenate([row.loss_mask for row in rows])),
        positions=torch.from_numpy(positions),
        cu_seqlens=torch.from_numpy(borders),
        max_seqlen=int(np.diff(borders).max()),
        keys=torch.from_numpy(keys),
    )


class Loader:
    """The micro-batches of one data-parallel rank, for any step.

    Args:
        samples: what is read.
        seq_len: tokens in a sequence.
        micro_batch_size: sequences in a micro-batch.
        global_batch_size: sequences in a step over all ranks; a multiple of micro_batch_size x dp_size.
        dp_size: number of data-parallel ranks.
        dp_rank: which of them this is.
        prefetch: micro-batches read ahead.
    """

    def __init__(
        self,
        samples: Samples,
        *,
        seq_len: int,
        micro_batch_size: int,
        global_batch_size: int,
        dp_size: int,
        dp_rank: int,
        prefetch: int,
    ):
        assert samples.seq_len == seq_len, (samples.seq_len, seq_len)
        assert global_batch_size % (micro_batch_size * dp_size) == 0, (global_batch_size, micro_batch_size, dp_size)
        assert 0 <= dp_rank < dp_size, (dp_rank, dp_size)
        self._samples = samples
        self._micro_batch_size = micro_batch_size
        self._global_batch_size = global_batch_size
        self._dp_size = dp_size
        self._dp_rank = dp_rank
        self._prefetch = prefetch
        self._reader: _ReadAhead | None = None
        self.grad_accum_steps = global_batch_size // (micro_batch_size * dp_size)

    def step_batches(self, step: int) -> list[Batch]:
        """The rank's micro-batches of one step, counted from 1, read here and now."""
        return [make_batch(self._samples, start, self._micro_batch_size) for start in self._starts(step)]

    def steps(self, first: int, last: int) -> Iterator[tuple[int, list[Batch]]]:
        """Yield (step, micro-batches) for steps first..last, both included, while a thread reads ahead.

        One iteration at a time: starting another, leaving this one or `close` ends the thread.

        Raises:
            DataError: a sample cannot be read.
        """
        self.close()
        starts = (start for step in range(first, last + 1) for start in self._starts(step))
        reader = self._reader = _ReadAhead(self._samples, starts, self._micro_batch_size, self._prefetch)
        try:
            for step in range(first, last + 1):
                yield step, [reader.next() for _ in range(self.grad_accum_steps)]
        finally:
            reader.close()

    def close(self) -> None:
        """End the reading thread, if one runs."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _starts(self, step: int) -> list[int]:
        """First global sample of each micro-batch of a step."""
        assert step >= 1, step
        first = (step - 1) * self._global_batch_size
        return [
            first + (number * self._dp_size + self._dp_rank) * self._micro_batch_size
            for number in range(self.grad_accum_steps)
        ]


class _ReadAhead:
    """A daemon thread that fills a bounded queue with batches, or with the error that stopped it."""

    def __init__(self, samples: Samples, starts: Iterator[int], micro_batch_size: int, depth: int):
        self._queue: queue.Queue[Batch | BaseException] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(samples, starts, micro_batch_size), name="megalite-loader", daemon=True
        )
        self._thread.start()

    def next(self) -> Batch:
        """The next batch; raises what the thread raised."""
        assert not self._stop.is_set(), "the loader was closed while its steps were read"
        item = self._queue.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self) -> None:
        """Stop the thread and wait for it."""
        self._stop.set()
        self._thread.join()

    def _run(self, samples: Samples, starts: Iterator[int], micro_batch_size: int) -> None:
        try:
            for start in starts:
                if not self._put(make_batch(samples, start, micro_batch_size)):
                    return
        except Exception as error:
            self._put(error)

    def _put(self, item: Batch | BaseException) -> bool:
        """Queue an item; False when asked to stop instead."""
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=POLL_SECONDS)
                return True
            except queue.Full:
                continue
        return False


def _read(samples: Samples, index: int) -> Sample:
    try:
        return samples.sample(index)
    except Exception as error:
        source, epoch, position = samples.identity(index)
        where = f"global sample {index} (source {source!r}, epoch {epoch}, sample {position} of it)"
        raise DataError(f"{where} cannot be read: {error}") from error
