"""Between the replicas of a stage: gradients are summed as soon as a bucket has them, weights follow once updated.

    sums       reduce-scatter, each replica getting its run of a bucket    (without ZeRO: all-reduce)
    weights    all-gather                                                  (without ZeRO: nothing)

Of n bytes of gradients and of weights a rank sends (r - 1) / r n each, r being the replicas. Nothing here waits for a
message: a reduction runs beside the backward pass of earlier layers, a gathering beside the forward pass of the step
that follows, up to the layer that needs it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.engine.native.buckets import Bucket, FlatWeights
from megalite.parallel.axes import Axis
from megalite.parallel.collectives import all_reduce


class Replication:
    """The traffic of one stage's buckets.

    Args:
        buckets: of the stage, each with the replicas that share it.
        is_sharded: each replica updates a run of every bucket.
        ties: by bucket and number in it, parameters that another stage has too, whose sums are added up first.
        ends: the two stages that have those.
        wire_dtype: format in which gradients travel.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        *,
        is_sharded: bool,
        end_sums: Sequence[Tensor],
        ends: Axis,
        wire_dtype: torch.dtype,
    ):
        self._buckets, self._is_sharded = buckets, is_sharded
        self._end_sums, self._ends, self._wire_dtype = end_sums, ends, wire_dtype
        self._reductions: list[tuple[Bucket, dist.Work | None, Tensor]] = []
        self._gatherings: dict[int, dist.Work | None] = {}

    def reduce(self, number: int) -> None:
        """Begin to sum a bucket over the replicas. Tied weights, which are in the first, are summed over stages before,
        and that is waited for."""
        if number == 0:
            for each in self._end_sums:
                all_reduce(each, self._ends)
        bucket = self._buckets[number]
        if bucket.replicas.size == 1:
            return
        sums = bucket.sums.to(self._wire_dtype)
        if self._is_sharded:
            run = sums[bucket.own]
            work = _reduce_scatter(run, sums, group=bucket.replicas.group, async_op=True)
        else:
            run, work = sums, dist.all_reduce(sums, group=bucket.replicas.group, async_op=True)
        self._reductions.append((bucket, work, run))

    def wait_for_sums(self) -> None:
        """All that `reduce` has begun is there."""
        for bucket, work, run in self._reductions:
            if work is not None:
                work.wait()
            if run.dtype != bucket.sums.dtype:
                (bucket.own_sums if self._is_sharded else bucket.sums).copy_(run)
        self._reductions.clear()

    def gather(self) -> None:
        """Begin to bring the updated weights together, the first layers' first."""
        self._gatherings = dict(enumerate(map(self._begin_gathering, self._buckets)))

    def gather_still(self, buckets: Sequence[FlatWeights]) -> None:
        """Bring together what no step changes: each replica has set its run."""
        for work in [self._begin_gathering(bucket) for bucket in buckets]:
            if work is not None:
                work.wait()

    def _begin_gathering(self, bucket: FlatWeights) -> dist.Work | None:
        if not self._is_sharded or bucket.replicas.size == 1:
            return None
        return _all_gather(bucket.weights, bucket.own_weights, group=bucket.replicas.group, async_op=True)

    def wait_for_weights(self, numbers: Sequence[int] | None = None) -> None:
        """The weights of some buckets are there; None for all."""
        for number in list(self._gatherings) if numbers is None else numbers:
            work = self._gatherings.pop(number, None)
            if work is not None:
                work.wait()


# torch 2.13 renamed these: the old names warn there, the new ones do not exist before.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
