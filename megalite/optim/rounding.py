"""Weights that live in bf16 alone: updates in fp32, stochastic rounding (Gupta et al. 2015).

bf16 has eight significant bits, so an update below a 512th of a weight, as most are, would be lost by rounding to the
nearest, again at every step. Here a weight goes to one of its two neighbours by chance, with odds by which the mean is
the fp32 result. The chance is a hash of (seed, weight, step, place in the weight): every layout rounds alike, and a
restart needs no state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megalite.optim.at_work import AT_ONCE
from megalite.optim.slices import Slice, batches, chunks, pieces, places_in_whole
from megalite.parallel.random import name_seed, random_bits

Columns = dict[str, list[Tensor]]
"""By name, one flat tensor for each slice: gradients, states, directions."""

Update = Callable[[list[Tensor], Columns], None]
"""Changes fp32 weights in place, given columns for them."""


def update_in_place(parts: Sequence[Slice], columns: Columns, update: Update) -> None:
    """Update fp32 weights, at most `AT_ONCE` numbers at a time: an update may have results beside as many."""
    weights = [part.tensors["weight"] for part in parts]
    runs = [(number, run) for number, weight in enumerate(weights) for run in pieces(weight.numel(), AT_ONCE)]
    for batch in batches(runs, lambda each: each[1].stop - each[1].start):
        of_batch = {name: [column[number][run] for number, run in batch] for name, column in columns.items()}
        update([weights[number][run] for number, run in batch], of_batch)


def update_and_round(parts: Sequence[Slice], columns: Columns, update: Update, *, seed: int, step: int) -> None:
    """Update bf16 weights, chunk after chunk: no more than that is ever there in fp32."""
    for number, part in enumerate(parts):
        weight, seed_of_step = part.tensors["weight"], name_seed(seed, f"rounding/{part.local.weight.name}/{step}")
        for chunk in chunks(weight):
            exact = weight[chunk].float()
            update([exact], {name: [column[number][chunk].float()] for name, column in columns.items()})
            places = places_in_whole(part, chunk, weight.device)
            weight[chunk] = round_by_chance(exact, places, seed_of_step)


def round_by_chance(x: Tensor, keys: Tensor, seed: int) -> Tensor:
    """Round to bf16, up or down with odds by which the mean over the seeds is the number itself.

    Args:
        x: fp32, finite.
        keys: int64, of the same shape; what differs here is rounded independently.
        seed: from `name_seed`.
    """
    bits = x.view(torch.int32) + random_bits(keys, seed, 16).to(torch.int32)  # carries into bf16's 16 bits, or not
    return (bits >> 16 << 16).view(torch.float32).bfloat16()
