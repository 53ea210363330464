"""The gradients of a step, added up micro-batch by micro-batch as they are made.

    a product of the gemm seam   -> `take`: added to the sum, now, or when it is asked for (`held_back`)
    autograd, for all the rest   -> a hook: added, and autograd's own copy let go

Each weight is used so often a micro-batch, and a step has so many, so it is known when a sum is whole; when all of a
bucket are, its reduction over the replicas begins, while earlier layers are still at their backward pass. Buckets are
reduced from the last to the first, whatever becomes whole first, so that all ranks make the same calls in one order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from megalite.engine.native.buckets import Bucket
from megalite.engine.protocol import GradientObserver
from megalite.layers.opaque import keeping_operands
from megalite.layers.weight_gradients import WeightGradient, WholeGradient

Held = list[tuple[nn.Parameter, WeightGradient]]
"""Gradients that wait to be made."""


class _Sum:
    """Of one parameter."""

    def __init__(self, bucket: int, total: Tensor, uses: int):
        self.bucket, self.total, self.uses = bucket, total, uses
        self.num_left = 0
        self.is_begun = False


class GradientSums:
    """All sums of a stage.

    The gemm seam is given `take` when the stage is made; `bind` follows, once the parameters are in buckets.
    """

    def __init__(self) -> None:
        self._sums: dict[nn.Parameter, _Sum] = {}
        self._buckets: Sequence[Bucket] = ()
        self._num_at_end = 0
        self._left: list[int] = []
        self._next = -1
        self._held: Held | None = None
        self._reduce: Callable[[int], None] = lambda bucket: None
        self.micro_batch = 0
        """Whose gradients come now."""
        self.observer: GradientObserver | None = None
        """Is told each gradient; set for steps that are measured."""
        self._seen: dict[tuple[nn.Parameter, int], list[Tensor]] = {}

    def bind(
        self,
        buckets: Sequence[Bucket],
        uses: Mapping[nn.Parameter, int],
        reduce: Callable[[int], None],
        *,
        num_at_end: int = 0,
    ) -> None:
        """Say where the sums are.

        Args:
            buckets: of the stage, in the model's order.
            uses: how often a micro-batch makes a gradient of a parameter, where that is not once.
            reduce: begins the reduction of a bucket, by its number; called once a step for each, in falling order.
            num_at_end: of the first buckets, whose reduction must wait until all passes of the step are over.
        """
        self._buckets, self._reduce, self._num_at_end = buckets, reduce, num_at_end
        hook = _without_keeping(self._from_autograd)
        for number, bucket in enumerate(buckets):
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                self._sums[parameter] = _Sum(number, view, uses.get(parameter, 1))
                parameter.register_post_accumulate_grad_hook(hook)

    def begin(self, num_micro_batches: int) -> None:
        """Begin a step."""
        for each in self._sums.values():
            each.num_left, each.is_begun = each.uses * num_micro_batches, False
        self._left = [len(bucket.parameters) for bucket in self._buckets]
        self._next = len(self._buckets) - 1

    def begin_with_zeros(self) -> None:
        """Begin a step whose micro-batches all do the same: each adds, and no reduction begins before `finish`."""
        self.begin(0)
        for each in self._sums.values():
            each.is_begun = True
        for bucket in self._buckets:
            bucket.sums.zero_()

    def now_at(self, micro_batch: int) -> None:
        """Say whose gradients come now."""
        self.micro_batch = micro_batch

    def take(self, parameter: nn.Parameter, gradient: WeightGradient) -> None:
        """A gradient of one use in one micro-batch."""
        if self._held is not None:
            self._held.append((parameter, gradient))
        else:
            self._add(parameter, gradient)

    @contextmanager
    def held_back(self) -> Iterator[Held]:
        """Within it gradients of products are not made; they come back as a list, for `add`."""
        held: Held = []
        self._held = held
        try:
            with keeping_operands():
                yield held
        finally:
            self._held = None

    def add(self, held: Held) -> None:
        """Make what was held back."""
        while held:
            self._add(*held.pop(0))

    def finish(self) -> None:
        """All gradients are there: begin the reductions that have not begun. What had no gradient has none now."""
        for each in self._sums.values():
            if not each.is_begun:
                each.total.zero_()
        while self._next >= 0:
            self._reduce_next()

    @torch.no_grad()
    def _add(self, parameter: nn.Parameter, gradient: WeightGradient) -> None:
        found = self._sums.get(parameter)
        if found is None:  # frozen: its product is not made
            return
        self._make(parameter, gradient, found)
        found.num_left -= 1
        if found.num_left == 0:
            self._left[found.bucket] -= 1
            while self._next >= self._num_at_end and self._left[self._next] == 0:
                self._reduce_next()

    def _make(self, parameter: nn.Parameter, gradient: WeightGradient, found: _Sum) -> None:
        if self.observer is not None:
            gradient = self._tell(self.observer, parameter, gradient.make(), found.uses)
        if found.is_begun:
            gradient.add_to(found.total)
        else:
            gradient.begin(found.total)
            found.is_begun = True

    def _tell(self, observer: GradientObserver, parameter: nn.Parameter, made: Tensor, uses: int) -> WholeGradient:
        """Tell a micro-batch's gradient, once all uses of the parameter have added to it."""
        seen = self._seen.setdefault((parameter, self.micro_batch), [])
        seen.append(made)
        if len(seen) == uses:
            observer(parameter, made if uses == 1 else torch.stack(seen).sum(0), self.micro_batch)
            del self._seen[parameter, self.micro_batch]
        return WholeGradient(lambda: made)

    def _from_autograd(self, parameter: nn.Parameter) -> None:
        made, parameter.grad = parameter.grad, None
        if made is not None:  # else a product's, which was handed over
            self._add(parameter, WholeGradient(lambda: made))

    def _reduce_next(self) -> None:
        self._reduce(self._next)
        self._next -= 1


def _without_keeping(method: Callable[[nn.Parameter], None]) -> Callable[[nn.Parameter], None]:
    """A hook of parameters that does not keep its object, which keeps them: a circle through autograd, which garbage
    collection does not see, and so all of an engine's memory."""
    found = weakref.WeakMethod(method)

    def call(parameter: nn.Parameter) -> None:
        method = found()
        if method is not None:
            method(parameter)

    return call
