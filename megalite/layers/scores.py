"""Scores of attention, a block of them at a time in a buffer that every block uses again.

Heads that share a key and value head are rows of one matrix: row r is token r // g, g being the heads that share one.
Legend: t tokens, n query heads, m key and value heads, d head_dim.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK_ROWS = 128
"""Rows of a head that are multiplied at once: half of a causal block on the diagonal is made for nothing."""
BLOCK_TOKENS = 16
"""At least so many tokens are, however many heads share a key."""
BLOCK_SCORES = 2**20
"""Scores that exist at once, unless one head has more: 4 MB."""


class Scores:
    """Scores of documents of one length, block by block.

    Args:
        q: `[count x queries, n, d]`, the last tokens of each document.
        k: `[count x length, m, d]`.
        before: tokens between the first key and the first query of each; None where their last ones are the same.
        lengths: of documents that are made as if they were one, `count` being 1 then; empty where each is by itself.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        count: int,
        window: int | None,
        before: int | None = None,
        lengths: tuple[int, ...] = (),
    ):
        self.num_queries, self.length, self.window = q.shape[0] // count, k.shape[0] // count, window
        self._lengths = lengths
        self._before = self.length - self.num_queries if before is None else before
        self.groups = q.shape[1] // k.shape[1]
        self.dtype = torch.promote_types(q.dtype, torch.float32)
        self.scale = q.shape[2] ** -0.5
        self.queries = by_head(q, count, k.shape[1]).to(self.dtype) * self.scale
        """`[count x m, length x g, d]`, scaled."""
        self._keys = by_head(k, count, k.shape[1]).to(self.dtype).transpose(1, 2)
        self._block_tokens = max(BLOCK_TOKENS, BLOCK_ROWS // self.groups)
        widest = self.length if window is None else min(self.length, window - 1 + self._block_tokens)
        self._size = min(self._block_tokens, self.num_queries) * self.groups * widest
        self._num_heads = max(1, min(self.queries.shape[0], BLOCK_SCORES // self._size))
        self._buffers: dict[str, Tensor] = {}

    def blocks(self) -> Iterator[tuple[slice, slice, slice]]:
        """Heads, rows and keys of each block."""
        for head in range(0, self.queries.shape[0], self._num_heads):
            for start in range(0, self.num_queries, self._block_tokens):
                stop = min(start + self._block_tokens, self.num_queries)
                first_key = 0 if self.window is None else max(0, self._before + start - self.window + 1)
                rows = slice(start * self.groups, stop * self.groups)
                keys = slice(first_key, min(self._before + stop, self.length))
                if keys.start >= keys.stop:
                    continue  # outside of the window
                yield slice(head, min(head + self._num_heads, self.queries.shape[0])), rows, keys

    def softmax(self, heads: slice, rows: slice, keys: slice) -> Tensor:
        """Weights of a block, `[heads, rows, keys]`, until the next block's."""
        scores = self.of_block(heads, rows, keys)
        return torch.softmax(scores, -1, out=scores)

    def beside(self, z: Tensor, heads: slice, rows: slice, keys: slice) -> Tensor:
        """The same where another score, `z [heads, rows, 1]`, is counted too; z becomes the log of the sum of all."""
        scores = self.of_block(heads, rows, keys)
        z[heads, rows] = torch.logaddexp(scores.logsumexp(-1, keepdim=True), z[heads, rows])
        return scores.sub_(z[heads, rows]).exp_()

    def shares(self, z: Tensor, heads: slice, rows: slice, keys: slice) -> Tensor:
        """The same, given the log of that sum."""
        return self.of_block(heads, rows, keys).sub_(z[heads, rows]).exp_()

    def of_block(self, heads: slice, rows: slice, keys: slice) -> Tensor:
        """Scores of a block, `[heads, rows, keys]`, -inf for what is not seen, until the next block's."""
        left, right = self.queries[heads, rows], self._keys[heads, :, keys]
        scores = torch.bmm(left, right, out=self._buffer("scores", left, right))
        if self._lengths:
            scores += unseen(self._lengths, self.window, self.groups, self.dtype, scores.device)[rows, keys]
            return scores
        num_tokens = scores.shape[1] // self.groups
        num_before = self._before + rows.start // self.groups - keys.start
        num_keys = scores.shape[2]
        if num_before < num_keys:
            scores[:, :, num_before:] += _later(num_tokens, self.groups, self.dtype, scores.device)[
                :, : num_keys - num_before
            ]
        if self.window is not None and (spare := self.window - 1 - num_before) < num_tokens:
            scores[:, :, :num_tokens] += _too_early(num_tokens, spare, self.groups, self.dtype, scores.device)[
                :, :num_keys
            ]
        return scores

    def slopes(self, weights: Tensor, grads: Tensor, values: Tensor) -> Tensor:
        """Gradients of a block's scores, `[heads, rows, keys]`, until the next block's; `values` is transposed."""
        slopes = torch.bmm(grads, values, out=self._buffer("slopes", grads, values))
        return torch._softmax_backward_data(slopes, weights, -1, self.dtype, grad_input=slopes)

    def _buffer(self, name: str, left: Tensor, right: Tensor) -> Tensor:
        """Memory for a product."""
        if name not in self._buffers:
            self._buffers[name] = left.new_empty(self._num_heads * self._size)
        shape = (left.shape[0], left.shape[1], right.shape[2])
        return self._buffers[name][: shape[0] * shape[1] * shape[2]].view(shape)


@functools.lru_cache(maxsize=64)
def unseen(
    lengths: tuple[int, ...], window: int | None, groups: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Added to scores of some documents that are made as if they were one, `[t x groups, t]`: -inf where the key is
    another one's, later, or outside the window."""
    document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    seen = (document[:, None] == document).tril_()
    if window is not None:
        seen.triu_(1 - window)
    hidden = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))
    return hidden.repeat_interleave(groups, dim=0).to(device)


@functools.lru_cache(maxsize=64)
def _later(num_tokens: int, groups: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Added to scores of a block's own keys, `[num_tokens x groups, num_tokens]`: -inf where they are later."""
    hidden = torch.full((num_tokens, num_tokens), float("-inf"), dtype=dtype, device=device).triu_(1)
    return hidden.repeat_interleave(groups, dim=0)


@functools.lru_cache(maxsize=64)
def _too_early(num_tokens: int, spare: int, groups: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Added to scores of a block's first keys, `[num_tokens x groups, num_tokens]`: -inf where they lie outside the
    window, in which the block's first token could see so many more."""
    hidden = torch.full((num_tokens, num_tokens), float("-inf"), dtype=dtype, device=device).tril_(-1 - spare)
    return hidden.repeat_interleave(groups, dim=0)


def apart(x: Tensor, count: int, num_groups: int) -> Tensor:
    """`[count x length, n, d]` -> a view `[count, num_groups, length, n / num_groups, d]`."""
    return x.unflatten(1, (num_groups, -1)).unflatten(0, (count, -1)).transpose(1, 2)


def by_head(x: Tensor, count: int, num_groups: int) -> Tensor:
    """`[count x length, n, d]` -> `[count x num_groups, length x n / num_groups, d]`."""
    return apart(x, count, num_groups).reshape(count * num_groups, -1, x.shape[2])
