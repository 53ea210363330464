"""Blocks whose input waits for the backward pass in the host's memory.

    forward     block 0    block 1    block 2          the device's work
                  input 0 >  input 1 >  input 2 >      copies to the host, in a stream of their own
    backward    block 2    block 1    block 0
                < input 1  < input 0                   copies back, each begun a block before it is needed

A block's graph keeps nothing, and what it needs is made again when its gradient comes: full recomputation, with an
input that is not on the device in between. On a CPU there is no other memory, and inputs are kept where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megalite.layers.documents import Documents


class HostStore:
    """Where the inputs of a stage's blocks wait, on which device so ever they are made."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._latest: Kept | None = None

    def begin_pass(self) -> None:
        """The blocks that come are of another pass: none of them comes before the first in its backward pass."""
        self._latest = None

    def put(self, x: Tensor) -> Kept:
        """Keep an input, which a copy begins for that nothing waits for."""
        if x.device.type != "cuda":
            return Kept(x, None, None)
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._latest = Kept(x, self._stream, self._latest)
        return self._latest


class Kept:
    """One input.

    Args:
        stream: of the copies; None to keep it where it is.
        before: the input of the block before, which is needed next.
    """

    def __init__(self, x: Tensor, stream: torch.cuda.Stream | None, before: Kept | None):
        self._before, self._stream, self._device = before, stream, x.device
        self._host, self._back = x, None if stream is not None else x
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
                self._host.copy_(x, non_blocking=True)
            x.record_stream(stream)  # whose memory is not given away before the copy is made

    def fetch(self) -> None:
        """Begin to bring it back."""
        if self._back is None and self._stream is not None:
            with torch.cuda.stream(self._stream):
                self._back = self._host.to(self._device, non_blocking=True)

    def take(self) -> Tensor:
        """It, on its device, once; the one before is on its way from here on."""
        self.fetch()
        found = self._back
        assert found is not None
        if self._stream is not None:
            self._back = None  # the host's is there for another backward pass
            torch.cuda.current_stream().wait_stream(self._stream)
            found.record_stream(torch.cuda.current_stream())
        if self._before is not None:
            self._before.fetch()
        return found


def run_offloaded(
    store: HostStore,
    context: Callable[[Documents], AbstractContextManager],
    block: nn.Module,
    x: Tensor,
    documents: Documents,
) -> Tensor:
    """Run a block; its backward pass runs it again, within a context, as far as it needs what comes of it."""
    if not torch.is_grad_enabled():
        return block(x, documents)
    kept, first, is_wanted = store.put(x.detach()), [x], x.requires_grad

    def run(documents: Documents) -> Tensor:
        return block(first.pop() if first else kept.take().requires_grad_(is_wanted), documents)

    def contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
        return nullcontext(), context(documents)

    # What the graph would save of the block is made again, so nothing of it keeps x, nor does `run` from here on
    return checkpoint(run, documents, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
