"""Batches for one data-parallel rank: samples laid end to end as one stream of tokens, read ahead by a thread.

    step s uses the G global samples from `BatchSizes.first_sample(s)` on
    micro-batch a of dp rank r holds offsets (a x dp + r) x m + [0, m) of those       (G = a x dp x m)

Ranks of unlike speeds take unlike numbers of them (`config.shares`), each a run of micro-batches behind another.

The thread finds the places of some thousand samples at once and then fills batch after batch in compiled code, which
releases the interpreter lock; so a process a loader would bring nothing but a copy of every batch.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain, islice

import numpy as np
import torch

from megalite.config.batch_sizes import BatchSizes
from megalite.config.schema import Config
from megalite.config.shares import deal_out
from megalite.data.samples import Samples
from megalite.errors import DataError
from megalite.spans import span

SAMPLES_AHEAD = 4096
"""Samples whose places the reading thread finds in one go: the fixed cost of the array operations fades at some
hundreds, and the files' sizes are looked at as often."""

TOKENS_AT_ONCE = 1 << 17
"""Tokens of the micro-batches that are read by one call, when they are small: some 20 microseconds a call then cost a
sixth of the time. They are views of the same 4 megabytes."""


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
    """Tokens in a sequence: no span is longer. The same for every batch, so that graphs compiled for one fit all."""
    keys: torch.Tensor
    """[t] int64: global sample index x seq_len + place in the sequence; a token's name in every layout."""
    borders: torch.Tensor | None = None
    """`cu_seqlens` in host memory, wherever the batch is."""
    weights: torch.Tensor | None = None
    """[t] fp32: how much each label weighs in the loss, 0 where loss_mask is False; None where those that count all
    weigh 1. All micro-batches of a run have them, or none."""
    ahead: torch.Tensor | None = None
    """[depths, 3, t] int64: for a model that predicts further than the next token, the tokens that are k further, their
    labels, and whether these count (1 or 0)."""
    ahead_weights: torch.Tensor | None = None
    """[depths, t] fp32: how much these weigh; None where those that count all weigh 1."""
    pairs: torch.Tensor | None = None
    """fp64 scalar: pairs of answers in it, by whose number a step's loss is divided in place of the weights, of which
    some are negative then; None where tokens are learnt for themselves."""

    def __post_init__(self) -> None:
        if self.borders is None:
            self.borders = self.cu_seqlens.cpu()

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """A copy on `device`."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def up_to(self, key: int) -> Batch:
        """The same, of which no label of a token from a key on counts."""
        if not self.keys.numel() or self.keys[-1] < key:
            return self
        counts = self.keys < key
        weights = None if self.weights is None else self.weights * counts
        return replace(self, labels=self.labels * counts, loss_mask=self.loss_mask & counts, weights=weights)

    def pin_memory(self) -> Batch:
        """A copy that a GPU reads by itself, so that `to` need not wait for it."""
        return self._map(torch.Tensor.pin_memory)

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved = {name: change(x) for name, x in values.items() if isinstance(x, torch.Tensor) and name != "borders"}
        return Batch(**{**values, **moved})


def make_batch(samples: Samples, start: int, micro_batch_size: int) -> Batch:
    """Read global samples start..start + micro_batch_size - 1 as one stream.

    Raises:
        DataError: a sample cannot be read; the message names its source and number.
    """
    ((batch,),) = make_batches(samples, [start], micro_batch_size)
    return batch


def make_batches(samples: Samples, starts: Sequence[int], micro_batch_size: int) -> Iterator[list[Batch]]:
    """`make_batch` for several starts: their samples are located together, and read in groups of `batches_at_once`.

    Raises:
        DataError: a sample cannot be read; the batches before it were yielded.
    """
    offsets = np.arange(micro_batch_size, dtype=np.int64)
    places = samples.locate((np.array(starts, np.int64)[:, None] + offsets).ravel())
    places = places.reshape(len(starts), micro_batch_size, 3)
    step = batches_at_once(samples, micro_batch_size)
    for first in range(0, len(starts), step):
        group = slice(first, first + step)
        yield from _read_group(samples, starts[group], places[group])


def batches_at_once(samples: Samples, micro_batch_size: int) -> int:
    """Micro-batches that are read by one call."""
    return max(1, TOKENS_AT_ONCE // (micro_batch_size * samples.seq_len))


def _read_group(samples: Samples, starts: Sequence[int], places: np.ndarray) -> Iterator[list[Batch]]:
    """Micro-batches read by one call; one by one when that fails, so that the good ones before the error come out.

    Args:
        samples: what is read.
        starts: first global sample of each micro-batch.
        places: int64 [batches, micro_batch_size, 3] of their samples.
    """
    from megalite.data.gather import count_up, span_borders  # numba takes a second to import

    try:
        rows = samples.read(places.reshape(-1, 3))
    except Exception as error:
        if len(starts) == 1:
            raise _explain(samples, starts[0], places[0], error) from error
        for number in range(len(starts)):
            yield from _read_group(samples, starts[number : number + 1], places[number : number + 1])
        return
    shape = (len(starts), places.shape[1] * samples.seq_len)
    keys = np.empty(shape, np.int64)
    count_up(keys, np.array(starts, np.int64) * samples.seq_len)
    columns = (rows.tokens, rows.labels, rows.loss_mask, rows.positions, keys)
    tensors = (torch.from_numpy(column.reshape(shape)).unbind() for column in columns)
    weights = torch.from_numpy(rows.weights.reshape(shape)).unbind() if samples.is_weighted else [None] * len(starts)
    group = []
    for number, (tokens, labels, loss_mask, positions, names) in enumerate(zip(*tensors, strict=True)):
        borders = torch.from_numpy(span_borders(rows.positions.reshape(shape)[number]))
        batch = Batch(tokens, labels, loss_mask, positions, borders, samples.seq_len, names, weights=weights[number])
        group.append(batch)
    yield group


class Loader:
    """The micro-batches of one data-parallel rank, for any step.

    Args:
        samples: what is read.
        micro_batch_size: sequences in a micro-batch.
        batch_sizes: sequences of each step over all ranks; those of steps that are read are multiples of
            micro_batch_size x dp_size.
        dp_size: number of data-parallel ranks.
        dp_rank: which of them this is.
        prefetch: micro-batches read ahead; more where several are read at once because they are small.
        pin_memory: hand out what `steps` reads in page-locked memory, for ranks that train on a GPU.
        speeds: of the data-parallel ranks; None where they take equally many micro-batches.
    """

    def __init__(
        self,
        samples: Samples,
        *,
        micro_batch_size: int,
        batch_sizes: BatchSizes,
        dp_size: int,
        dp_rank: int,
        prefetch: int,
        pin_memory: bool = False,
        speeds: Sequence[float] | None = None,
    ):
        assert 0 <= dp_rank < dp_size, (dp_rank, dp_size)
        self._samples = samples
        self._micro_batch_size = micro_batch_size
        self._batch_sizes = batch_sizes
        self._dp_size = dp_size
        self._dp_rank = dp_rank
        self._prefetch = prefetch
        self._pin_memory = pin_memory
        self._speeds = speeds
        self._reader: _ReadAhead | None = None

    @classmethod
    def for_run(
        cls,
        samples: Samples,
        config: Config,
        batch_sizes: BatchSizes,
        *,
        dp_size: int,
        dp_rank: int,
        pin_memory: bool = False,
        speeds: Sequence[float] | None = None,
    ) -> Loader:
        """The loader of one data-parallel rank with the micro-batches of a config."""
        assert samples.seq_len == config.batch.seq_len, (samples.seq_len, config.batch.seq_len)
        return cls(
            samples,
            micro_batch_size=config.batch.micro_batch_size,
            batch_sizes=batch_sizes,
            dp_size=dp_size,
            dp_rank=dp_rank,
            prefetch=config.data.prefetch,
            pin_memory=pin_memory,
            speeds=speeds,
        )

    def step_batches(self, step: int) -> list[Batch]:
        """The rank's micro-batches of one step, counted from 1, read here and now."""
        return list(chain.from_iterable(make_batches(self._samples, self._starts(step), self._micro_batch_size)))

    def steps(self, first: int, last: int) -> Iterator[tuple[int, list[Batch]]]:
        """Yield (step, micro-batches) for steps first..last, both included, while a thread reads ahead.

        One iteration at a time: starting another, leaving this one or `close` ends the thread.

        Raises:
            DataError: a sample cannot be read.
        """
        self.close()
        starts = (start for step in range(first, last + 1) for start in self._starts(step))
        reader = self._reader = _ReadAhead(
            self._samples, starts, self._micro_batch_size, self._prefetch, pin_memory=self._pin_memory
        )
        try:
            for step in range(first, last + 1):
                with span("data"):
                    batches = [reader.next() for _ in self._starts(step)]
                yield step, batches
        finally:
            reader.close()

    def close(self) -> None:
        """End the reading thread, if one runs."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _starts(self, step: int) -> list[int]:
        """First global sample of each micro-batch of a step."""
        first, size = self._batch_sizes.first_sample(step), self._batch_sizes.size(step)
        stride = self._dp_size * self._micro_batch_size
        assert size % stride == 0, (step, size, self._dp_size, self._micro_batch_size)
        if self._speeds is not None:
            counts = deal_out(size // self._micro_batch_size, self._speeds)
            before, own = sum(counts[: self._dp_rank]), counts[self._dp_rank]
            return [first + number * self._micro_batch_size for number in range(before, before + own)]
        return list(range(first + self._dp_rank * self._micro_batch_size, first + size, stride))


class _ReadAhead:
    """A daemon thread that fills a queue with groups of batches, or with the error that stopped it.

    It takes a slot for each group that it hands over, and the consumer gives one back for each that it takes: no more
    than `depth` batches wait, or one group if that is more, beside the one in the thread's hands.
    """

    def __init__(self, samples: Samples, starts: Iterator[int], micro_batch_size: int, depth: int, *, pin_memory: bool):
        self._gpu = torch.cuda.current_device() if pin_memory else None
        self._ready: queue.SimpleQueue[list[Batch] | BaseException] = queue.SimpleQueue()
        self._slots: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._taken: list[Batch] = []
        for _ in range(max(1, depth // batches_at_once(samples, micro_batch_size))):
            self._slots.put(None)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(samples, starts, micro_batch_size), name="megalite-loader", daemon=True
        )
        self._thread.start()

    def next(self) -> Batch:
        """The next batch; raises what the thread raised."""
        assert not self._stop.is_set(), "the loader was closed while its steps were read"
        if not self._taken:
            item = self._ready.get()
            if isinstance(item, BaseException):
                raise item
            self._slots.put(None)
            self._taken = item[::-1]
        return self._taken.pop()

    def close(self) -> None:
        """Stop the thread and wait for it."""
        self._stop.set()
        self._slots.put(None)  # wakes it
        self._thread.join()

    def _run(self, samples: Samples, starts: Iterator[int], micro_batch_size: int) -> None:
        try:
            if self._gpu is not None:
                torch.cuda.set_device(self._gpu)  # of this thread: it would take memory of the first one otherwise
            while stretch := list(islice(starts, max(1, SAMPLES_AHEAD // micro_batch_size))):
                samples.check_unchanged()
                for batches in make_batches(samples, stretch, micro_batch_size):
                    group = [batch.pin_memory() for batch in batches] if self._gpu is not None else batches
                    self._slots.get()
                    if self._stop.is_set():
                        return
                    self._ready.put(group)
        except Exception as error:
            self._ready.put(error)


def _explain(samples: Samples, start: int, places: np.ndarray, error: Exception) -> DataError:
    """The error of a micro-batch, told of the sample that has it: the samples are read again, one by one."""
    for index in range(len(places)):
        try:
            samples.read(places[index : index + 1])
        except Exception as own_error:
            source, epoch, position = samples.identity(start + index)
            where = f"global sample {start + index} (source {source!r}, epoch {epoch}, sample {position} of it)"
            return DataError(f"{where} cannot be read: {own_error}")
    return DataError(f"global samples {start} to {start + len(places) - 1} cannot be read: {error}")
