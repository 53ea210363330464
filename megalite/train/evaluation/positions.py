"""How well a model predicts tokens that stand far from their document's beginning: the loss by position.

A model that reads no further than it was trained to, or was trained with another rotation, shows it here: from some
position on the loss rises, where more context should lower it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megalite.data.indexed import IndexedTokens
from megalite.data.sources import open_tokens, tokens_folder
from megalite.errors import DataError
from megalite.layers.documents import Targets
from megalite.model.transformer import Stage, documents_of

FIRST_BORDER = 128
"""Positions below it are one range; each range after it is twice as long as the one before."""


@dataclass(frozen=True)
class RangeLoss:
    """The loss of the tokens at some positions."""

    first: int
    stop: int
    """One past the last position."""
    loss: float
    """Mean cross-entropy, in nats."""
    num_tokens: int

    def record(self) -> dict[str, Any]:
        """A JSON-ready form."""
        return {**asdict(self), "perplexity": exp(min(self.loss, 700.0))}


def long_documents(path: Path, length: int, most: int) -> list[np.ndarray]:
    """The beginnings of documents that are long enough, from all over a source: int64 `[length + 1]` each.

    Args:
        path: what `megalite data tokenize` or `pack` made, or a .bin/.idx pair.
        length: tokens that a model will read.
        most: documents.

    Raises:
        DataError: the source cannot be opened, or has no such document.
    """
    tokens = open_tokens(tokens_folder(path)).tokens
    starts = tokens.document_starts(0, tokens.num_documents + 1)
    lengths = np.diff(starts)
    (fitting,) = np.nonzero(lengths > length)
    if not fitting.size:
        longest = int(lengths.max(initial=0))
        raise DataError(
            f"{path}: no document has more than {length} tokens, the longest has {longest}; ask for fewer with "
            "--lengths, or name other data"
        )
    chosen = fitting[np.linspace(0, fitting.size - 1, min(most, fitting.size)).astype(int)]
    return [_beginning(tokens, int(starts[number]), length + 1) for number in chosen]


def loss_by_position(stage: Stage, documents: Iterable[np.ndarray], device: torch.device) -> list[RangeLoss]:
    """The mean loss of each range of positions, over documents of one length."""
    losses = torch.stack([_losses(stage, document, device) for document in documents]).double()
    return in_ranges(losses.sum(0), torch.full(losses.shape[1:], len(losses)))


def in_ranges(sums: Tensor, counts: Tensor) -> list[RangeLoss]:
    """Means over ranges of positions that double; ranges without tokens are left out.

    Args:
        sums: `[length]` losses of all tokens at each position.
        counts: `[length]` how many these are.
    """
    length, found, first = sums.shape[0], [], 0
    while first < length:
        stop = min(length, 2 * first or FIRST_BORDER)
        if count := int(counts[first:stop].sum()):
            found.append(RangeLoss(first, stop, sums[first:stop].sum().item() / count, count))
        first = stop
    return found


@torch.inference_mode()
def _losses(stage: Stage, document: np.ndarray, device: torch.device) -> Tensor:
    """The cross-entropy of each token but the first, `[length]`, on the CPU."""
    numbers = torch.from_numpy(document).to(device)
    tokens, labels = numbers[:-1], numbers[1:]
    losses = torch.zeros(labels.shape, device=device)
    stage(tokens, documents_of(tokens.unsqueeze(0)), Targets(labels, torch.ones_like(losses), losses))
    return losses.cpu()


def _beginning(tokens: IndexedTokens, start: int, length: int) -> np.ndarray:
    return tokens.read(start, start + length).astype(np.int64)


def told(ranges: Sequence[RangeLoss]) -> str:
    """In a line: losses from range to range."""
    return ", ".join(f"{each.loss:.2f} up to {each.stop:,}" for each in ranges)
