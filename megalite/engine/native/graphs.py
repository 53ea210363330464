"""Micro-batches whose kernels a GPU starts by itself: recorded once as a CUDA graph, and repeated as one (Gray,
"Getting started with CUDA graphs", NVIDIA 2019).

A small model's kernels end sooner than a host can start the next ones; a graph is started once, whatever is in it. It
does again what was done while it was recorded, on the same memory. So what a micro-batch consists of is copied into
buffers, the sums that it adds to begin with zeros, and nothing in it may ask the host.

    the first of a shape              as ever; buffers keep it
    a later step's first              as ever; recorded with the buffers as they are, which hold another; repeated with
                                      its own numbers, and compared: a record that remembers the other is found out
    every further one                 repeated

What ranks send within a micro-batch (tensor parallelism) is in the graph; the sums are reduced behind the last one, and
weights are waited for before the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from megalite.data.loader import Batch
from megalite.errors import UnavailableError

MOST_GRAPHS = 8
"""Shapes that are recorded; each takes the memory of a pass's activations at most, which all share."""

AGREEMENT = 1e-2
"""Relative, of losses and norms of gradients: kernels that add up in any order differ by less, wrong ones by more."""

INSTEAD = "set train.cuda_graphs=false"

Run = Callable[[Batch, Tensor], Tensor]
"""Both passes of a micro-batch whose valid tokens weigh so much: its losses, fp32 `[n]`."""


@dataclass
class FixedBatch(Batch):
    """A micro-batch as a graph is given it: its documents' borders are not known to the host, and of so many that
    batches of about as many documents share a graph."""

    def __post_init__(self) -> None:
        """Nothing is copied to the host."""

    @classmethod
    def of(cls, batch: Batch) -> FixedBatch:
        """The same micro-batch."""
        values = {field.name: getattr(batch, field.name) for field in fields(batch)}
        return cls(**{**values, "borders": None, "cu_seqlens": _filled_up(batch)})

    def tensors(self) -> dict[str, Tensor]:
        """What it consists of, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def shape(self) -> tuple[Any, ...]:
        """The same for all that share a graph."""
        return self.max_seqlen, *((name, x.shape, x.dtype) for name, x in self.tensors().items())


@dataclass
class _Record:
    """Where a graph reads, and what it has made."""

    batch: FixedBatch
    scale: Tensor
    graph: torch.cuda.CUDAGraph | None = None
    losses: Tensor | None = None

    @classmethod
    def of(cls, batch: FixedBatch, scale: Tensor) -> _Record:
        copies = {name: x.clone() for name, x in batch.tensors().items()}
        values = {field.name: getattr(batch, field.name) for field in fields(batch)}
        return cls(FixedBatch(**{**values, **copies}), scale.clone())

    def repeat(self, batch: FixedBatch, scale: Tensor) -> Tensor:
        given, buffers = batch.tensors(), self.batch.tensors()
        for name, buffer in buffers.items():
            buffer.copy_(given[name])
        self.scale.copy_(scale)
        assert self.graph is not None
        assert self.losses is not None
        self.graph.replay()
        return self.losses


class MicroBatchGraphs:
    """The graphs of one stage, which is a whole model.

    Args:
        run: both passes of a micro-batch.
        totals: tells the tensors that a pass adds to, zero before a step's first one; they stay where they are.
        constants: tells what a pass takes from the host; when it changes, between steps, all is recorded anew.
    """

    def __init__(self, run: Run, totals: Callable[[], Sequence[Tensor]], constants: Callable[[], Any]):
        self._run, self._totals, self._constants = run, totals, constants
        self._by_shape: dict[tuple[Any, ...], _Record] = {}
        self._recorded_with: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None

    def train(self, batches: Sequence[Batch], scale: Tensor) -> Tensor:
        """All micro-batches of a step: their losses, added up.

        Raises:
            UnavailableError: they cannot be recorded, or a graph does something else.
        """
        if (constants := self._constants()) != self._recorded_with:
            self.forget()
            self._recorded_with = constants
        total = None
        for batch in batches:  # one after the other, as without graphs
            losses = self._train_one(FixedBatch.of(batch), scale, is_first=total is None)
            total = losses.clone() if total is None else total + losses
        assert total is not None, "a step has a micro-batch"
        return total

    def forget(self) -> None:
        """Give all memory back; what comes is recorded anew."""
        self._by_shape.clear()
        self._pool = None

    def _train_one(self, batch: FixedBatch, scale: Tensor, *, is_first: bool) -> Tensor:
        found = self._by_shape.get(shape := batch.shape())
        if found is None:
            self._by_shape[shape] = _Record.of(batch, scale)
            return self._run(batch, scale)
        if found.graph is not None:
            return found.repeat(batch, scale)
        is_wanted = is_first and sum(each.graph is not None for each in self._by_shape.values()) < MOST_GRAPHS
        return self._record(found, batch, scale) if is_wanted else self._run(batch, scale)

    def _record(self, buffers: _Record, batch: FixedBatch, scale: Tensor) -> Tensor:
        stream = self._stream = self._stream or torch.cuda.Stream(scale.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # what libraries do at their first call on a stream is not to be recorded
            wanted = self._numbers(self._run(batch, scale))
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                losses = self._run(buffers.batch, buffers.scale)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            why = str(error).splitlines()[0]
            raise UnavailableError(f"train.cuda_graphs: a micro-batch cannot be recorded ({why}); {INSTEAD}") from error
        self._pool = self._pool or graph.pool()
        buffers.graph, buffers.losses = graph, losses
        for total in self._totals():
            total.zero_()
        made = self._numbers(losses := buffers.repeat(batch, scale))
        if not all(_agree(*pair) for pair in zip(made, wanted, strict=True)):
            raise UnavailableError(
                f"train.cuda_graphs: repeated from its record a micro-batch has the losses and norms of gradients "
                f"{made}, and computed as ever {wanted}: something in the model remembers an earlier one; {INSTEAD}"
            )
        return losses

    def _numbers(self, losses: Tensor) -> list[float]:
        """By which two passes are compared."""
        norms = [torch.linalg.vector_norm(total.float()) for total in self._totals()]
        return torch.cat((losses.flatten(), torch.stack(norms))).tolist()


def _filled_up(batch: Batch) -> Tensor:
    """`cu_seqlens`, with empty documents behind the last up to a power of two of them, and no more than tokens. Batches
    of whole sequences keep it: attention knows them by its length (`Documents.are_whole_sequences`)."""
    found, num_tokens = batch.cu_seqlens, batch.tokens.shape[0]
    num_documents = found.shape[0] - 1
    if num_documents * batch.max_seqlen == num_tokens:
        return found
    wanted = min(1 << (num_documents - 1).bit_length(), num_tokens)
    return torch.cat((found, found.new_full((wanted - num_documents,), num_tokens)))


def _agree(made: float, wanted: float) -> bool:
    return math.isclose(made, wanted, rel_tol=AGREEMENT) or (math.isnan(made) and math.isnan(wanted))
