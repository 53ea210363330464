"""What the layers know of the stream they work on: its documents, and what its tokens should predict."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megalite.layers.rope import Rotation


@dataclass
class Documents:
    """The documents of one micro-batch, laid end to end in a stream of t tokens."""

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

    @cached_property
    def lengths(self) -> list[int]:
        """Length of each document in tokens."""
        borders = (self.cu_seqlens if self.borders is None else self.borders).tolist()
        return [stop - start for start, stop in itertools.pairwise(borders) if stop > start]

    @cached_property
    def reach_of_tokens(self) -> Tensor:
        """`[t]` int64, for each token how far the positions of its document reach, as a number of tokens. Nothing waits
        for it."""
        places = torch.arange(self.positions.shape[0], device=self.cu_seqlens.device, dtype=self.cu_seqlens.dtype)
        ends = self.cu_seqlens[torch.searchsorted(self.cu_seqlens, places, right=True)]
        return self.positions[ends - 1] + 1


@dataclass
class Targets:
    """What a micro-batch's stream of t tokens should predict."""

    labels: Tensor
    """`[t]` int64, the next token; anything where the weight is 0."""
    weights: Tensor
    """`[t]` fp32, weight of each token in the loss."""
    losses: Tensor | None = None
    """`[t]` fp32, to be filled with each token's own cross-entropy, unweighted; None when nobody asks."""
