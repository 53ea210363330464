"""Between the replicas of a stage: gradients are summed as soon as a bucket has them, weights follow once updated.

    sums       reduce-scatter, each replica getting its run of a bucket    (without ZeRO: all-reduce)
               over gloo, whose reduce-scatter sends twice as much, and in few bits: all-to-all, and what has come is
               added up                                                    (without ZeRO: and an all-gather of sums)
    weights    all-gather                                                  (without ZeRO: nothing)

Of n bytes of gradients and of weights a rank sends (r - 1) / r n each, r being the replicas. Nothing here waits for a
message: a reduction runs beside the backward pass of earlier layers, a gathering beside the forward pass of the step
that follows, up to the layer that needs it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.engine.native.buckets import Bucket, FlatWeights
from megalite.engine.wire import Wire, add_up, by_neighbour, pack, unpack
from megalite.engine.wire_bytes import UNDER_WAY
from megalite.parallel.axes import Axis, ReplicaGroups
from megalite.parallel.collectives import all_reduce, fill_all_gather, fill_reduce_scatter
from megalite.parallel.messages import begin_runs, begun


class Replication:
    """The traffic of one stage's buckets.

    Args:
        buckets: of the stage, each with the replicas that share it.
        is_sharded: each replica updates a run of every bucket.
        end_sums: of parameters that another stage has too, which are in the first bucket: they are added up first.
        ends: the two stages that have those.
        wire: how gradients and weights travel.
        hops: within a node, and between nodes, where rounded gradients travel in two.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        *,
        is_sharded: bool,
        end_sums: Sequence[Tensor],
        ends: Axis,
        wire: Wire,
        hops: ReplicaGroups | None = None,
    ):
        self._buckets, self._is_sharded = buckets, is_sharded
        self._end_sums, self._ends, self._wire, self._hops = end_sums, ends, wire, hops
        self._messages: deque[tuple[Bucket, _Message, bool]] = deque()
        """What carries gradients of a bucket that are added up here, and whether it goes to their owners."""
        self._reductions: list[tuple[Bucket, list[dist.Work], Tensor]] = []
        self._gatherings: dict[int, tuple[Bucket, _Message]] = {}

    def reduce(self, number: int) -> None:
        """Begin to sum a bucket over the replicas. Tied weights, which are in the first, are summed over stages before,
        and that is waited for."""
        if number == 0:
            for each in self._end_sums:
                all_reduce(each, self._ends)
        bucket = self._buckets[number]
        if bucket.replicas.size == 1:
            return
        self._add_up_messages(UNDER_WAY)
        if self._wire.reduce_bits is not None:
            self._send_rounded(bucket)
            return
        sums, group = bucket.sums.to(self._wire.dtype), bucket.replicas.group
        if self._is_sharded and dist.get_backend(group) == "gloo":
            self._send(bucket, sums, bucket.replicas, is_last=True)
        elif self._is_sharded:
            run = sums[bucket.own]
            work = fill_reduce_scatter(run, sums, group=group, async_op=True)
            self._reductions.append((bucket, begun(work), run))
        else:
            self._reductions.append((bucket, begun(dist.all_reduce(sums, group=group, async_op=True)), sums))

    def wait_for_sums(self) -> None:
        """All that `reduce` has begun is there."""
        self._add_up_messages()
        for bucket, works, run in self._reductions:
            for work in works:
                work.wait()
            if run.dtype != bucket.sums.dtype:
                (bucket.own_sums if self._is_sharded else bucket.sums).copy_(run)
        self._reductions.clear()

    def gather(self) -> None:
        """Begin to bring the updated weights together, the first layers' first."""
        for number, bucket in enumerate(self._buckets):
            if not self._is_sharded or bucket.replicas.size == 1:
                continue
            mine, everybodys = bucket.own_weights, bucket.weights
            if self._wire.gather_bits is not None:
                packed = pack(bucket.master, self._wire.gather_bits)
                mine = packed.to(bucket.weights.device, non_blocking=True).view(-1)
                everybodys = mine.new_empty(bucket.replicas.size * mine.numel())
            works = begin_runs(everybodys, mine, bucket.replicas, tag=number)
            self._gatherings[number] = bucket, _Message(works, mine, everybodys)

    def gather_still(self, buckets: Sequence[FlatWeights]) -> None:
        """Bring together what no step changes, as it is: each replica has set its run."""
        for bucket in buckets:
            if self._is_sharded and bucket.replicas.size > 1:
                fill_all_gather(bucket.weights, bucket.own_weights, group=bucket.replicas.group)

    def wait_for_weights(self, numbers: Sequence[int] | None = None) -> None:
        """The weights of some buckets are there; None for all."""
        for number in list(self._gatherings) if numbers is None else numbers:
            if number not in self._gatherings:
                continue
            bucket, message = self._gatherings.pop(number)
            message.wait()
            if self._wire.gather_bits is not None:
                rows = message.received.view(bucket.replicas.size, -1)
                with torch.no_grad():
                    unpack(rows, self._wire.gather_bits, bucket.weights)

    def _send_rounded(self, bucket: Bucket) -> None:
        """Begin to send each replica its run of a bucket's sums, or each neighbour those of its like in all nodes."""
        if self._hops is None:
            self._send(bucket, bucket.sums, bucket.replicas, is_last=True)
        else:
            near = self._hops.shards
            self._send(bucket, by_neighbour(bucket.sums, self._hops.copies.size, near.size), near, is_last=False)

    def _send(self, bucket: Bucket, numbers: Tensor, to: Axis, *, is_last: bool) -> None:
        sent = numbers if self._wire.reduce_bits is None else pack(numbers, self._wire.reduce_bits, to.size)
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=to.group, async_op=True)
        self._messages.append((bucket, _Message(begun(work), sent, received), is_last))

    def _add_up_messages(self, num_left: int = 0) -> None:
        """Sum what has been sent to this replica, and send it on where it is not the owner's yet. Where all need all
        sums, begin to bring these together.

        Args:
            num_left: of the messages, the last, to go on with. A number that all ranks have: what follows is sent in
                the same order everywhere.
        """
        while len(self._messages) > num_left:
            bucket, message, is_last = self._messages.popleft()
            message.wait()
            if not is_last:
                assert self._hops is not None
                total = bucket.sums.new_empty(bucket.sums.numel() // self._hops.shards.size)
                add_up(message.received, self._wire.reduce_bits, total)
                self._send(bucket, total, self._hops.copies, is_last=True)
                continue
            add_up(message.received, self._wire.reduce_bits, bucket.sums[bucket.run])
            if not self._is_sharded:
                sums = bucket.sums.to(self._wire.dtype)
                works = begin_runs(sums, sums[bucket.run], bucket.replicas, tag=self._buckets.index(bucket))
                self._reductions.append((bucket, works, sums))


class _Message:
    """On its way.

    Args:
        sent: kept until it is over.
    """

    def __init__(self, works: list[dist.Work], sent: Tensor, received: Tensor):
        self._works, self._sent, self.received = works, sent, received

    def wait(self) -> None:
        for work in self._works:
            work.wait()
