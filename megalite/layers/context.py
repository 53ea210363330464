"""Attention of a context-parallel rank, which has some tokens of every document and is to see those before them.

    allgather   keys and values of all ranks are gathered; each rank attends with its own queries
                (Grattafiori et al. 2024, section 3.3.2)
    ring        they go round, and each rank adds up what its queries see of them (`layers.ring`)
    ulysses     an all-to-all gives each rank all tokens of some heads, and another one brings the results back
                (Jacobs et al. 2023)

Gathering sends keys and values alone, little where query heads share them, and the cut is free to be even. Ulysses
sends queries and results too, in all no more for more ranks, and any attention does, which sees whole documents.

Legend: t tokens of the stream, of which a rank has t/cp; n query heads, m key and value heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megalite.layers.attention import Attend, padded_values
from megalite.layers.documents import ContextShare, Documents
from megalite.layers.ring import attend_around
from megalite.parallel.axes import Axis
from megalite.parallel.collectives import gather_anew, gather_in_order, to_parts, to_rows

OverContext = Callable[[Attend], Attend]
"""Makes the attention of a rank with some tokens out of one that is given what those see."""

WholeStream = Callable[[Tensor, Documents], Tensor]
"""Rows of a rank's own tokens -> those of all tokens that these may see."""


def own(x: Tensor, documents: Documents) -> Tensor:
    """Of a rank that has all tokens, or whose attention finds the others."""
    return x


def alone(attend: Attend) -> Attend:
    """Of a rank that has all tokens."""
    return attend


def choose_context(cp: Axis, kind: str, *, keeps_all: bool) -> OverContext:
    """Attention for `parallel.cp_kind`.

    Args:
        keeps_all: nothing is recomputed in the backward pass, so what is gathered would be kept.
    """
    if cp.size == 1:
        return alone
    if kind == "ring":
        return lambda attend: partial(attend_around, cp)  # its own kernel, which says how large the scores were
    over = _attend_by_heads if kind == "ulysses" else partial(_attend_gathered, keeps_all)
    return lambda attend: partial(over, cp, attend)


@dataclass(frozen=True)
class LatentContext:
    """What context parallelism makes of latent attention."""

    over: OverContext = alone
    whole: WholeStream = own
    """What is done to latents before heads are made of them."""


ALL_HERE = LatentContext()
"""Of a rank that has all tokens."""


def choose_latent_context(cp: Axis, kind: str) -> LatentContext:
    """Latents for `parallel.cp_kind`: they are what is gathered; else heads go round, or are exchanged, as others."""
    if cp.size == 1:
        return ALL_HERE
    if kind == "allgather":
        return LatentContext(whole=partial(_gathered_latents, cp))
    over = choose_context(cp, kind, keeps_all=False)
    return LatentContext(over=lambda attend: padded_values(over(attend)))


def _gathered_latents(cp: Axis, x: Tensor, documents: Documents) -> Tensor:
    assert documents.share is not None, "a stream that is not cut"
    return whole_stream(x, cp, documents.share)


def whole_stream(x: Tensor, cp: Axis, share: ContextShare) -> Tensor:
    """The rows of all ranks as they stand in the stream: `[t/cp, ...]` -> `[t, ...]`."""
    return gather_in_order(x, cp, share.order, share.places)


def _attend_gathered(
    keeps_all: bool,
    cp: Axis,
    attend: Attend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
    window: int | None,
    **of_heads: Tensor,
) -> Tensor:
    assert documents.share is not None, "a stream that is not cut"
    own = torch.cat((k, v), dim=1)
    whole = whole_stream(own, cp, documents.share)
    keys, values = whole.split((k.shape[1], v.shape[1]), dim=1)
    if not keeps_all or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return attend(q, keys, values, documents, window, **of_heads)
    again = _GatheredAgain(own.detach(), whole, cp, documents.share)
    with torch.autograd.graph.saved_tensors_hooks(again.pack, again.unpack):
        return attend(q, keys, values, documents, window, **of_heads)


class _GatheredAgain:
    """Keeps a rank's own keys and values in place of all that were gathered, and gathers them once more when the
    backward pass asks."""

    def __init__(self, own: Tensor, whole: Tensor, cp: Axis, share: ContextShare):
        self._own, self._cp, self._places = own, cp, share.places
        self._memory = whole.untyped_storage().data_ptr()
        self._whole: Tensor | None = None
        self._num_views = self._num_asked = 0

    def pack(self, x: Tensor) -> Any:
        """A tensor that is kept: itself, or which part of the whole it is."""
        if x.device != self._own.device or x.untyped_storage().data_ptr() != self._memory:
            return x
        self._num_views += 1
        return x.shape, x.stride(), x.storage_offset()

    def unpack(self, kept: Any) -> Tensor:
        """What was kept. The whole is there until its last part has been asked for."""
        if isinstance(kept, Tensor):
            return kept
        if self._whole is None:
            self._whole = gather_anew(self._own, self._cp.size, self._cp.group_name)[self._places]
        part = self._whole.as_strided(*kept)
        self._num_asked += 1
        if self._num_asked % self._num_views == 0:
            self._whole = None
        return part


def _attend_by_heads(
    cp: Axis,
    attend: Attend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
    window: int | None,
    **of_heads: Tensor,
) -> Tensor:
    assert documents.share is not None, "a stream that is not cut"
    if k.shape[1] % cp.size:
        k, v = (x.repeat_interleave(cp.size // x.shape[1], dim=1) for x in (k, v))
    sizes = [x.shape[1] // cp.size for x in (q, k, v)]
    together = torch.cat([x.unflatten(1, (cp.size, -1)) for x in (q, k, v)], dim=2)
    queries, keys, values = to_parts(together, cp).split(sizes, dim=1)
    own_heads = {name: each.chunk(cp.size)[cp.rank] for name, each in of_heads.items()}
    mixed = attend(queries, keys, values, documents.share.whole, window, **own_heads)
    return to_rows(mixed, cp).flatten(1, 2)
