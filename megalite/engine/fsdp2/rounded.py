"""FSDP2's collectives in few bits: `engine.wire`, in the places that torch leaves for collectives of one's own.

    gather      each rank's rows, rounded; every rank unpacks all of them, its own too       bytes / 4 of fp32's
    reduction   all-to-all of rounded gradients, added up in fp32 at their owner
                over gloo, whose reduce-scatter sends all to all ranks, of exact ones too

Both are told what tensors their numbers are of, so that blocks are of one weight. They run where torch calls them: on a
GPU on the streams of its own collectives, behind the passes of other blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from megalite.engine.wire import Wire, add_up, by_neighbour, cut_padding, pack, padded, padded_size, unpack
from megalite.errors import UserError
from megalite.parallel.axes import Axis, ReplicaGroups
from megalite.parallel.collectives import fill_all_gather

Sizes = Callable[[], Sequence[int]]
"""Numbers of each weight of a module in its row of a message."""


class _Buffers:
    """Memory for torch's own tensors of a collective."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class RoundedGather(_Buffers):
    """An all-gather of weights.

    Args:
        bits: of a weight.
        sizes: of the weights.
        num_ranks: that divide the weights; among fewer are copies of what has been gathered, which travel as they are.
    """

    def __init__(self, bits: int, sizes: Sizes, num_ranks: int):
        self._bits, self._sizes, self._num_ranks = bits, sizes, num_ranks

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if group.size() != self._num_ranks:
            return fill_all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        sizes, num_ranks = self._sizes(), self._num_ranks
        sent = pack(padded(input_tensor, sizes), self._bits).view(-1)
        received = sent.new_empty(num_ranks * sent.numel())
        fill_all_gather(received, sent, group=group)
        rows = received.view(num_ranks, -1)
        numbers = output_tensor.new_empty((num_ranks, padded_size(sizes)))
        unpack(rows, self._bits, numbers)
        cut_padding(numbers, sizes, output_tensor, num_ranks)
        return None


class RoundedReduction(_Buffers):
    """A reduce-scatter of gradients.

    Args:
        bits: of a gradient.
        sizes: of the weights.
        hops: within a node, and between nodes, where gradients travel in two.
    """

    def __init__(self, bits: int, sizes: Sizes, hops: ReplicaGroups | None):
        self._bits, self._sizes, self._hops = bits, sizes, hops

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        assert op == dist.ReduceOp.SUM, f"gradients are added up, and nothing else: {op}"
        sizes, num_ranks = self._sizes(), group.size()
        numbers = padded(input_tensor, sizes, num_ranks)
        if self._hops is None:
            total = self._sum(numbers, num_ranks, group)
        else:
            near, far = self._hops.shards, self._hops.copies
            sums = self._sum(by_neighbour(numbers, far.size, near.size), near.size, near.group)
            total = self._sum(sums, far.size, far.group)
        cut_padding(total, sizes, output_tensor)
        return None

    def _sum(self, numbers: Tensor, num_ranks: int, group: dist.ProcessGroup | None) -> Tensor:
        """Of what all ranks of a group have of this one's run."""
        sent = pack(numbers, self._bits, num_ranks)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        total = numbers.new_empty(numbers.numel() // num_ranks)
        add_up(received, self._bits, total)
        return total


class ExactReduction(_Buffers):
    """A reduce-scatter of gradients by messages to their owners."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        assert op == dist.ReduceOp.SUM, f"gradients are added up, and nothing else: {op}"
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        torch.sum(received.view(group.size(), -1), 0, out=output_tensor.view(-1))
        return None


def set_collectives(module: FSDPModule, wire: Wire, replicas: Axis, hops: ReplicaGroups | None) -> None:
    """Have the collectives of a divided module send as little as they may.

    Args:
        replicas: the ranks that divide it.
        hops: in which its gradients travel.

    Raises:
        UserError: this torch has no place for such collectives.
    """
    if replicas.size == 1:
        return
    takes_own = hasattr(module, "set_custom_all_gather")
    if not wire.has_blocks:
        if takes_own and dist.get_backend(replicas.group) == "gloo":
            module.set_custom_reduce_scatter(ExactReduction())  # type: ignore[arg-type]
        return
    if not takes_own:
        raise UserError(
            f"precision.reduce_bits and gather_bits: torch {torch.__version__} takes no collectives of one's own for "
            "FSDP2; use torch 2.13, null, or zero_stage=1 with the native engine"
        )
    group: Any = module._get_fsdp_state()._fsdp_param_group
    trained = [each for each in group.fsdp_params if each.sharded_param.requires_grad]

    def sizes_of(parameters: Sequence[Any]) -> Sizes:
        return lambda: [each.padded_sharded_param_size.numel() for each in parameters]

    if wire.gather_bits is not None:
        gather = RoundedGather(wire.gather_bits, sizes_of(group.fsdp_params), replicas.size)
        module.set_custom_all_gather(gather)  # type: ignore[arg-type]
    if wire.reduce_bits is not None:
        module.set_custom_reduce_scatter(RoundedReduction(wire.reduce_bits, sizes_of(trained), hops))  # type: ignore[arg-type]
