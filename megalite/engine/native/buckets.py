"""Weights in flat tensors, and the sums of their gradients beside them.

    bucket 0    weights | embedding   | blocks.0 ...            | blocks.1 ...      |padding|
                sums    |             |                         |                   |       |      fp32
                        |       replica 0        |        replica 1                         |      ZeRO-1

A bucket is a run of the model's parameters. Its sums are reduced over the replicas by one collective, once all of them
are there, and its weights are gathered by one. Under ZeRO-1 each replica updates one of equally long runs of it,
without ZeRO all of it. In fp32 the weights are what is updated; in half precision, and where weights travel in few
bits, a master in fp32 is, of this rank's run.

Where numbers travel in few bits each parameter begins with a block of its own: ranks that hold the same one beside
others, as those of tensor parallelism do, round it alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megalite.engine.wire import PLAIN, Wire, whole_blocks
from megalite.engine.wire_bytes import BLOCK
from megalite.parallel.axes import Axis

BUCKET_NUMBERS = 40_000_000
"""In a bucket: 160 MB of fp32, and a hundredth of that still fills a link for each of a hundred replicas."""

ALIGNED_NUMBERS = 64
"""Runs begin at multiples of this many numbers: 256 bytes of fp32, as kernels and networks like it."""


def plan_buckets(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Numbers of the parameters in each bucket: in order, up to a limit, or one that is larger."""
    buckets: list[list[int]] = []
    filled = 0
    for number, size in enumerate(sizes):
        if not buckets or filled + size > limit:
            buckets.append([])
            filled = 0
        buckets[-1].append(number)
        filled += size
    return buckets


class FlatWeights:
    """Some parameters of a stage. Making it moves them into one flat tensor.

    Args:
        parameters: in the model's order.
        replicas: the ranks that hold the same and see other tokens.
        is_sharded: each stands for one of equally long runs.
        wire: how gradients and weights travel.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], replicas: Axis, *, is_sharded: bool, wire: Wire = PLAIN):
        self.parameters, self.replicas = list(parameters), replicas
        self._starts, size = list[int](), 0
        for parameter in self.parameters:
            self._starts.append(size)
            size += whole_blocks(parameter.numel()) if wire.has_blocks else parameter.numel()
        aligned = BLOCK if wire.has_blocks else ALIGNED_NUMBERS
        run_length = -(-size // (replicas.size * aligned)) * aligned
        first, total = self.parameters[0], replicas.size * run_length
        self.weights = torch.zeros(total, dtype=first.dtype, device=first.device)
        for parameter, view in zip(self.parameters, self._views(self.weights), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        self.run = slice(replicas.rank * run_length, (replicas.rank + 1) * run_length)
        """This replica's, of as many equally long ones."""
        self.own = self.run if is_sharded else slice(0, total)
        """What it stands for."""
        self.own_weights = self.weights[self.own]
        self.master = self.own_weights
        """What is updated and saved, `[length]`."""

    def part_of(self, number: int) -> tuple[int, Tensor] | None:
        """The run of the number-th parameter that this replica stands for: where in it that begins, and its masters."""
        begin, end = self._starts[number], self._starts[number] + self.parameters[number].numel()
        first, last = max(begin, self.own.start), min(end, self.own.stop)
        if first >= last:
            return None
        return first - begin, self.master.narrow(0, first - self.own.start, last - first)

    def _views(self, flat: Tensor) -> list[Tensor]:
        """Of each parameter its numbers in a tensor like `weights`."""
        starts = zip(self.parameters, self._starts, strict=True)
        return [flat.narrow(0, start, parameter.numel()).view(parameter.shape) for parameter, start in starts]


class StillBucket(FlatWeights):
    """Frozen weights: nothing is added up, sent or updated, and they are kept in the format that computes alone."""

    def __init__(self, parameters: Sequence[nn.Parameter], replicas: Axis, *, is_sharded: bool):
        super().__init__(parameters, replicas, is_sharded=is_sharded)
        for parameter in self.parameters:
            parameter.requires_grad_(False)


class Bucket(FlatWeights):
    """Weights that are trained; each replica updates its run.

    Args:
        on_host: the master, and the gradient that it is updated by, are in the host's memory.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        replicas: Axis,
        *,
        is_sharded: bool,
        on_host: bool = False,
        wire: Wire = PLAIN,
    ):
        super().__init__(parameters, replicas, is_sharded=is_sharded, wire=wire)
        first = self.parameters[0]
        self.sums = torch.zeros_like(self.weights, dtype=torch.promote_types(first.dtype, torch.float32))
        self.views = self._views(self.sums)
        """The sum of each parameter's gradients."""
        self.own_sums = self.sums[self.own]
        self._host_sums: Tensor | None = None
        if on_host:
            self.master, self._host_sums = (_in_host_memory(self.own_sums) for _ in range(2))
            self.master.copy_(self.own_weights)
        elif self.sums.dtype != first.dtype or (wire.gather_bits is not None and replicas.size > 1):
            self.master = self.own_weights.to(self.sums.dtype, copy=True)

    @property
    def gradient(self) -> Tensor:
        """Of the master, on its device (`engine.update.Updated`); a copy to the host waits for the device."""
        return self.own_sums if self._host_sums is None else self._host_sums.copy_(self.own_sums)

    @property
    def spare(self) -> Tensor:
        """Memory like the master's that nobody needs between steps: its gradient's."""
        return self.own_sums if self._host_sums is None else self._host_sums

    @torch.no_grad()
    def round_weights(self) -> None:
        """Make this replica's weights of its masters."""
        if self.master is not self.own_weights:
            self.own_weights.copy_(self.master, non_blocking=True)


def _in_host_memory(like: Tensor) -> Tensor:
    """Memory of the host's that a GPU reads and writes by itself, and no other program's pages take the place of."""
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=like.is_cuda)
