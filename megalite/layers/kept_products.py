"""Results that selective recomputation keeps of products which torch does not see.

Torch's selective checkpointing keeps results of its own ops. A library that multiplies by functions of its own would do
all of it again in the backward pass. So such a product says that it is one, and a checkpointed block keeps for it

    forward pass   the result, and what the library saves for its gradients (its inputs, rounded)
    again          the result is handed out; the library is not called

    keeper = Keeper()                the block's
    with keeper.keeping(): ...       its forward pass
    with keeper.handing_out(): ...   the same once more

A keeper belongs to the thread that entered it: autograd runs the second pass in one of its own.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

_of_thread = threading.local()


class Keeper:
    """Results of a block's products, from the first to the last."""

    def __init__(self) -> None:
        self._results: deque[Tensor] = deque()
        self._is_again = False

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep results of `keep_product`."""
        with self._entered():
            yield

    @contextmanager
    def handing_out(self) -> Iterator[None]:
        """Give them back in their order, each once."""
        self._is_again = True
        with self._entered():
            yield

    def result(self, multiply: Callable[[], Tensor]) -> Tensor:
        """Of the next product."""
        if self._is_again:
            return self._results.popleft().requires_grad_()
        # Unseen by the checkpoint, which counts torch's ops and what they save, and wants as many in the second pass
        with _disable_current_modes(), saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
            product = multiply()
        self._results.append(product.detach())
        return product

    @contextmanager
    def _entered(self) -> Iterator[None]:
        before = getattr(_of_thread, "keeper", None)
        _of_thread.keeper = self
        try:
            yield
        finally:
            _of_thread.keeper = before


def keep_product(multiply: Callable[[], Tensor]) -> Tensor:
    """A product `[t, out]` with gradients, which inside of a selectively recomputed block is made once."""
    keeper: Keeper | None = getattr(_of_thread, "keeper", None)
    return multiply() if keeper is None else keeper.result(multiply)
