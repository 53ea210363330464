"""What becomes of a micro-batch before the layers see it: padded to a number that the layout divides, and cut over
context-parallel ranks, which all have read the whole of it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from megalite.architecture.architecture import Architecture
from megalite.data.loader import Batch
from megalite.data.sample import NO_TOKEN
from megalite.layers.documents import Documents, put, share_of
from megalite.parallel.axes import Axis
from megalite.parallel.collectives import gather_in_order
from megalite.parallel.context import deal, in_a_row

PER_TOKEN = ("tokens", "labels", "loss_mask", "weights")
"""Columns of a batch that a rank has its own tokens of; the last one is not in every batch."""


@dataclass(kw_only=True)
class BatchShare(Batch):
    """A rank's tokens of a micro-batch."""

    documents: Documents
    """Of the whole of it, as this rank has them."""


class BatchCut:
    """Cuts micro-batches as `parallel.cp_kind` wants them.

    Args:
        axis: the ranks that share a micro-batch.
        unit: must divide its tokens.
    """

    def __init__(self, axis: Axis, kind: str, model: Architecture, unit: int = 1):
        self._axis, self._kind, self._unit = axis, kind, unit
        self._depths = model.num_predictions
        windows = [block.attention.window for block in model.blocks]
        self._window = None if None in windows else max(filter(None, windows))

    def own(self, batch: Batch) -> Batch:
        """What this rank trains on."""
        batch = with_ahead(padded(batch, self._unit), self._depths)
        if self._axis.size == 1:
            return batch
        whole = documents_of_batch(batch)
        total, size = batch.tokens.shape[0], self._axis.size
        if self._kind == "ulysses":
            stretches = in_a_row(total, size)
        else:
            assert batch.borders is not None, "set by every batch"
            stretches = deal(batch.borders.tolist(), size, self._window)
        documents = share_of(whole, stretches, self._axis.rank, keys_go_round=self._kind == "ring")
        assert documents.share is not None
        kept = {field.name: getattr(batch, field.name) for field in fields(batch)}
        cut = {name: kept[name][documents.share.own] for name in PER_TOKEN if kept[name] is not None}
        for name in ("ahead", "ahead_weights"):
            if kept[name] is not None:
                cut[name] = kept[name][..., documents.share.own]
        return BatchShare(
            **{**kept, **cut, "positions": documents.positions, "keys": documents.keys}, documents=documents
        )

    def whole(self, x: Tensor, own: Batch, batch: Batch) -> Tensor:
        """A number for each token of the batch, given those for what `own` made of it. Collective."""
        if isinstance(own, BatchShare):
            share = own.documents.share
            assert share is not None
            with torch.no_grad():
                x = gather_in_order(x, self._axis, share.order, share.places)
        return x[: batch.tokens.shape[0]]


def with_ahead(batch: Batch, depths: int) -> Batch:
    """A micro-batch with what lies further ahead of each token in its document, by so many layers' reach. Where that is
    of another document, or behind the batch's end, there is no token: whatever follows, a layer sees the same."""
    if not depths:
        return batch
    found, weights = [], []
    for depth in range(1, depths + 1):
        tokens, labels, mask, positions = (
            torch.roll(each, -depth) for each in (batch.tokens, batch.labels, batch.loss_mask, batch.positions)
        )
        is_there = positions == batch.positions + depth  # else of another document, or round the end
        found.append(torch.stack((tokens.where(is_there, NO_TOKEN), labels, (mask & is_there).long())))
        if batch.weights is not None:
            weights.append(torch.roll(batch.weights, -depth) * is_there)
    return replace(batch, ahead=torch.stack(found), ahead_weights=torch.stack(weights) if weights else None)


def padded(batch: Batch, unit: int) -> Batch:
    """A micro-batch with tokens of no sample at its end, so that `unit` divides it. Nothing is learned from them, and
    they lie in documents of their own, none longer than a sample."""
    given = batch.tokens.shape[0]
    number = -given % unit
    if number == 0:
        return batch
    assert batch.borders is not None, "set by every batch"
    places = torch.arange(number)
    ends = torch.tensor([*range(given + batch.max_seqlen, given + number, batch.max_seqlen), given + number])
    added = {
        "tokens": torch.full((number,), NO_TOKEN),
        "labels": torch.full((number,), NO_TOKEN),
        "loss_mask": torch.zeros(number, dtype=torch.bool),
        "positions": places % batch.max_seqlen,
        "keys": -1 - places,
        "cu_seqlens": ends,
    }
    kept = {field.name: getattr(batch, field.name) for field in fields(batch)}
    if batch.weights is not None:
        added["weights"] = torch.zeros(number)
    longer = {name: _longer(kept[name], numbers) for name, numbers in added.items()}
    return Batch(**{**kept, **longer, "borders": _longer(batch.borders, ends)})


def _longer(x: Tensor, numbers: Tensor) -> Tensor:
    return torch.cat((x, put(numbers.to(x.dtype), x.device)))


def documents_of_batch(batch: Batch) -> Documents:
    """The documents of a micro-batch, or of a rank's share of it."""
    if isinstance(batch, BatchShare):
        return replace(batch.documents)  # whose rotations are those of one pass
    return Documents(batch.positions, batch.cu_seqlens, batch.max_seqlen, batch.keys, borders=batch.borders)
