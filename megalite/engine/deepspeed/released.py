"""ZeRO-3's weights are let go behind a forward pass, whatever that has kept of them.

DeepSpeed takes a weight's memory away by giving it another. Of a weight torch's products keep a view, its transpose,
and with that view the memory: a model that was divided over all ranks would be whole on each of them at its loss.
DeepSpeed has a `linear` of its own against that, in place of torch's and for the whole process; here the weight is kept
in place of the view, which is made again when the backward pass has gathered it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor


class _OfWeight(NamedTuple):
    """A view of a weight by what makes it again."""

    weight: Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def keep_no_weights() -> AbstractContextManager[None]:
    """Within it, what is kept for a backward pass has no gathered weight in it."""
    return torch.autograd.graph.saved_tensors_hooks(_kept, _made_again)


def _kept(tensor: Tensor) -> Tensor | _OfWeight:
    weight = tensor if tensor._base is None else tensor._base
    if not hasattr(weight, "ds_id"):
        return tensor
    return _OfWeight(weight, tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()))


def _made_again(kept: Tensor | _OfWeight) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    return kept.weight.detach().as_strided(kept.size, kept.stride, kept.offset)
