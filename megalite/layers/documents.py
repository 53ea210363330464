"""What the layers know of the stream they work on: its documents, and what its tokens should predict."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megalite.layers.rope import Rotation
from megalite.parallel.context import KeySpan, Stretch, spans_of, spans_of_piece, whole_documents


@dataclass
class Documents:
    """The documents of one micro-batch, laid end to end in a stream of t tokens.

    Of a context-parallel rank's share of it (`share_of`), positions, keys and rotations are those of its own tokens,
    and the borders are those of the whole stream.
    """

    positions: Tensor
    """`[t]` int64, position of each token in its document."""
    cu_seqlens: Tensor
    """`[num_documents + 1]` int32, where each document begins, and t. May be padded with more t at its end."""
    max_seqlen: int
    """No document is longer, in tokens."""
    keys: Tensor
    """`[t]` int64, unique for each token of the whole training; seeds dropout."""
    rotation: Rotation | None = None
    """Rotary cos and sin of the stream, made once a pass by the model."""
    sliding_rotation: Rotation | None = None
    """That of blocks with a window, where it is another one."""
    borders: Tensor | None = None
    """`cu_seqlens` in host memory, for who walks from document to document; None to copy them there when asked, for
    which a GPU would be waited for."""
    share: ContextShare | None = None
    """Which tokens these are, where a rank has not all of them."""
    loss_weights: Tensor | None = None
    """`[t]` fp32, weight of each token in the loss of a training step, for losses that layers add to it; None where
    nothing is trained."""
    loss_share: float = 1.0
    """What these weights are of those of the step's targets."""

    def counting(self, weights: Tensor) -> Documents:
        """The same, where other tokens count in the loss.

        Args:
            weights: `[t]` fp32, as targets have them.
        """
        found = copy.copy(self)  # with what has been found out already
        found.loss_weights = weights * self.loss_share
        return found

    @cached_property
    def spans(self) -> list[KeySpan]:
        """What the queries see."""
        return whole_documents(self.lengths) if self.share is None else self.share.spans

    @property
    def span_table(self) -> Tensor:
        """What an op makes the spans of, by `spans_in`."""
        return self.cu_seqlens if self.share is None else self.share.table

    @cached_property
    def sequences(self) -> Tensor:
        """`[t]` int64, which sequence of the micro-batch each token is of."""
        share = self.share
        places = torch.arange(self.positions.shape[0], device=self.keys.device) if share is None else share.own
        return places // self.max_seqlen

    @property
    def are_whole_sequences(self) -> bool:
        """Whether every document is as long as any may be. Nothing waits for it."""
        return self.share is None and (self.cu_seqlens.shape[0] - 1) * self.max_seqlen == self.positions.shape[0]

    @property
    def num_sequences(self) -> int:
        """Of the micro-batch; what padding adds counts as one more."""
        num_tokens = self.positions.shape[0] if self.share is None else self.share.order.shape[0]
        return -(-num_tokens // self.max_seqlen)

    @cached_property
    def lengths(self) -> list[int]:
        """Length of each document in tokens."""
        return lengths_between(self.cu_seqlens if self.borders is None else self.borders)

    @cached_property
    def reach_of_tokens(self) -> Tensor:
        """`[t]` int64, for each token how far the positions of its document reach, as a number of tokens. Nothing waits
        for it."""
        if self.share is not None:
            return self.share.whole.reach_of_tokens[self.share.own]
        places = torch.arange(self.positions.shape[0], device=self.cu_seqlens.device, dtype=self.cu_seqlens.dtype)
        ends = self.cu_seqlens[torch.searchsorted(self.cu_seqlens, places, right=True)]
        return self.positions[ends - 1] + 1


@dataclass
class ContextShare:
    """A context-parallel rank's tokens of a micro-batch's stream."""

    whole: Documents
    """Of all ranks' tokens."""
    stretches: list[Stretch]
    """Its own, in the stream's order."""
    own: Tensor
    """`[t/cp]` int64, which they are."""
    order: Tensor
    """`[t]` int64: which tokens all ranks have, one rank after the other."""
    places: Tensor
    """`[t]` int64: where each token of the stream stands in that order."""
    spans: list[KeySpan]
    """What the rank's queries see."""
    table: Tensor
    """`[n, 4]` int64: the same in host memory, for an op."""
    pieces: Tensor
    """`[spans, 6]` int64: what they see of each rank's keys, where these go round: the step, and a `PieceSpan`."""

    @cached_property
    def on_device(self) -> list[SpansOnDevice]:
        """For kernels that take documents of any length, stretch by stretch."""
        found, rest = [], iter(self.spans)
        for stretch in self.stretches:
            num_tokens, spans = stretch.stop - stretch.start, []
            while num_tokens:
                spans.append(next(rest))
                num_tokens -= spans[-1].num_queries
            found.append(SpansOnDevice.of(spans, self.own.device))
        return found


@dataclass
class SpansOnDevice:
    """The spans of a stretch, which follow one another among queries and among keys."""

    queries: slice
    keys: slice
    of_queries: Tensor
    """`[n + 1]` int32, where each span's queries begin, from the first; and their number."""
    of_keys: Tensor
    """`[n + 1]` int32, the same of keys."""
    most_queries: int
    most_keys: int

    @classmethod
    def of(cls, spans: list[KeySpan], device: torch.device) -> SpansOnDevice:
        first, last = spans[0], spans[-1]
        counts = torch.tensor([(0, 0), *((span.num_queries, span.num_keys) for span in spans)], dtype=torch.int32)
        of_queries, of_keys = put(counts.cumsum(0, dtype=torch.int32), device).unbind(1)
        most_queries, most_keys = counts.amax(0).tolist()
        queries = slice(first.query, last.query + last.num_queries)
        keys = slice(first.key, last.key + last.num_keys)
        return cls(queries, keys, of_queries.contiguous(), of_keys.contiguous(), most_queries, most_keys)


def share_of(whole: Documents, stretches: list[list[Stretch]], rank: int, *, keys_go_round: bool = False) -> Documents:
    """The documents of a stream as a context-parallel rank has them, whose tokens are `stretches[rank]`."""
    device = whole.positions.device
    order = put(torch.cat([torch.arange(*stretch) for each in stretches for stretch in each]), device)
    own = order.chunk(len(stretches))[rank]
    borders = whole.cu_seqlens if whole.borders is None else whole.borders
    spans = spans_of(stretches[rank], borders.tolist())
    table, pieces = torch.tensor(spans), torch.empty(0, 6, dtype=torch.int64)
    if keys_go_round:
        pieces = _pieces(stretches, rank, borders.tolist())
    share = ContextShare(whole, stretches[rank], own, order, torch.argsort(order), spans, table, pieces)
    return Documents(
        whole.positions[own], whole.cu_seqlens, whole.max_seqlen, whole.keys[own], borders=whole.borders, share=share
    )


def put(x: Tensor, device: torch.device) -> Tensor:
    """A small table on a device. Nothing waits for it."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


def _pieces(stretches: list[list[Stretch]], rank: int, borders: list[int]) -> Tensor:
    """Step by step, of the rank's own keys first and then of those of the ranks before it."""
    rows = [
        (step, *span)
        for step in range(len(stretches))
        for span in spans_of_piece(stretches[rank], stretches[rank - step], borders)
    ]
    return torch.tensor(rows)


def spans_in(table: Tensor) -> list[KeySpan]:
    """The spans that an op was given: borders of documents `[n]`, or a share's table."""
    if table.dim() == 1:
        return whole_documents(lengths_between(table))
    return [KeySpan(*row) for row in table.tolist()]


def lengths_between(borders: Tensor) -> list[int]:
    """Length of each document in tokens, given where each begins, and the last one's end, repeated or not."""
    return [stop - start for start, stop in itertools.pairwise(borders.tolist()) if stop > start]


@dataclass
class Ahead:
    """What a layer that predicts further ahead is given, and should predict."""

    tokens: Tensor
    """`[t]` int64, the tokens that the one before it should predict; anything where the weight is 0."""
    labels: Tensor
    """`[t]` int64."""
    weights: Tensor
    """`[t]` fp32, of each token in the loss: 0 where its document ends before."""


@dataclass
class Targets:
    """What a micro-batch's stream of t tokens should predict."""

    labels: Tensor
    """`[t]` int64, the next token; anything where the weight is 0."""
    weights: Tensor
    """`[t]` fp32, weight of each token in the loss."""
    losses: Tensor | None = None
    """`[t]` fp32, to be filled with each token's own cross-entropy, unweighted; None when nobody asks."""
    ahead: tuple[Ahead, ...] = ()
    """For each layer that predicts further."""
