"""Room for so many tokens at each expert, and which of them get it: those with the largest weights.

An expert takes at most `capacity_factor` times its even share of a sequence's choices (GShard, Lepikhin et al. 2020,
counted by sequence). What finds no room is dropped: the token goes to its other experts, or past all of them in the
residual stream. Each sequence is dealt with by itself and whole, so that the same choices are dropped in any layout.
Weights are compared in bf16: tokens that are equal, as the first ones of two documents, stay so whatever a layout's
sums round to.

Legend: t tokens of this rank, T of the micro-batch, k chosen experts, e experts.
"""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import torch
from torch import Tensor

from megalite.architecture.settings import MoeConfig
from megalite.layers.documents import Documents
from megalite.parallel.axes import Axis
from megalite.parallel.collectives import gather_rows, own_rows


def room_for(settings: MoeConfig, seq_len: int) -> int:
    """Tokens of a sequence that an expert has room for, at least 1."""
    assert settings.capacity_factor is not None
    factor = Fraction(str(settings.capacity_factor))  # 1.1 x 20 is 22, and not a little more
    return max(1, ceil(factor * seq_len * settings.top_k / settings.num_experts))


@torch.no_grad()
def find_room(
    chosen: Tensor, weights: Tensor, documents: Documents, settings: MoeConfig, *, rows: Axis, cp: Axis
) -> Tensor:
    """`[t, k]` bool: which choices are kept. Collective over the axes. Of equal weights the earlier token's is.

    Args:
        chosen: `[t, k]` int64.
        weights: `[t, k]`.
        rows: the ranks that the rows of this one's stream are cut over, one after the other.
        cp: the ranks that the stream is cut over.
    """
    share = documents.share
    both = [gather_rows(gather_rows(x, rows), cp) for x in (chosen, weights.bfloat16())]
    all_chosen, all_weights = both if share is None else [x[share.places] for x in both]
    sequences = torch.arange(all_chosen.shape[0], device=chosen.device) // documents.max_seqlen
    cells = (sequences.unsqueeze(1) * settings.num_experts + all_chosen).flatten()
    num_cells = documents.num_sequences * settings.num_experts
    kept = rank_within(cells, all_weights.flatten(), num_cells) < room_for(settings, documents.max_seqlen)
    kept = kept.view_as(all_chosen)
    if share is not None:
        kept = kept[share.own]
    return own_rows(kept, rows)


def rank_within(cells: Tensor, values: Tensor, num_cells: int) -> Tensor:
    """`[n]`: how many of the same cell are before each: those of larger values, and of equal ones that come earlier.

    Args:
        cells: `[n]` int64.
        values: `[n]`.
    """
    by_value = values.argsort(descending=True, stable=True)
    order = by_value[cells[by_value].argsort(stable=True)]
    sizes = torch.zeros(num_cells, dtype=cells.dtype, device=cells.device)
    sizes = sizes.index_add(0, cells, torch.ones_like(cells))
    begins = sizes.cumsum(0) - sizes
    ranks = torch.arange(cells.shape[0], device=cells.device) - begins[cells[order]]
    return torch.empty_like(ranks).scatter(0, order, ranks)
