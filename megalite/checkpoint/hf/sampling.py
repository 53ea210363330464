"""Which token comes next: the model's distribution, made sharper or flatter, without its unlikely end.

    logits / temperature -> top_k likeliest -> of these the likeliest that together have top_p -> none below min_p of
    the likeliest -> one is drawn

Every filter works on what the one before it has left, as transformers' do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.errors import ConversionError


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Raises:
        ConversionError: a number is out of range, or has no effect.
    """

    temperature: float = 0.8
    """0 takes the likeliest token each time."""
    top_k: int | None = None
    """Draw from so many tokens at most; equally likely ones stay together."""
    top_p: float | None = None
    """Draw from the fewest tokens that together have this probability (nucleus sampling, Holtzman et al. 2020)."""
    min_p: float | None = None
    """Draw from tokens with at least this share of the likeliest one's probability."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 1e6:
            raise ConversionError(f"temperature: found {self.temperature:g}, expected a number from 0 to 1e6")
        if self.top_k is not None and self.top_k < 1:
            raise ConversionError(f"top-k: found {self.top_k}, expected a whole number from 1 on")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise ConversionError(f"top-p: found {self.top_p:g}, expected a number above 0, up to 1")
        if self.min_p is not None and not 0.0 <= self.min_p <= 1.0:
            raise ConversionError(f"min-p: found {self.min_p:g}, expected a number from 0 to 1")
        given = [name for name in ("top_k", "top_p", "min_p") if getattr(self, name) is not None]
        if self.temperature == 0 and given:
            names = " and ".join(name.replace("_", "-") for name in given)
            raise ConversionError(f"{names}: no effect with temperature 0, which takes the likeliest token each time")


def filtered(logits: Tensor, sampling: Sampling) -> Tensor:
    """The logits `[vocab]` that are drawn by, -inf where a token is out; temperature is not 0."""
    scores = logits.float() / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < len(scores):
        scores = scores.masked_fill(scores < scores.topk(sampling.top_k).values[-1], -torch.inf)
    if sampling.top_p is not None and sampling.top_p < 1.0:
        ordered, places = scores.sort(descending=True, stable=True)
        shares = ordered.softmax(0)
        before = shares.cumsum(0) - shares  # of tokens that are likelier: the likeliest always stays
        scores = scores.index_fill(0, places[before >= sampling.top_p], -torch.inf)
    if sampling.min_p is not None:
        shares = scores.softmax(0)
        scores = scores.masked_fill(shares < sampling.min_p * shares.max(), -torch.inf)
    return scores


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """The next token, of logits `[vocab]`."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(filtered(logits, sampling).softmax(0), 1, generator=generator))
