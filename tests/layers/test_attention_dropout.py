"""Dropout of attention's weights, against plain attention with a mask that is written down apart."""

from __future__ import annotations

import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from megalite.config.load import load_config
from megalite.config.plan import default_world_size
from megalite.config.validate import validate
from megalite.errors import ConfigError
from megalite.layers.attention import ScoreOptions, attend_spelled_out
from megalite.layers.attention_dropout import DroppingAttention
from megalite.layers.documents import Documents
from megalite.parallel.axes import Axis
from megalite.parallel.random import kept_pairs, name_seed

RATE = 0.3
HEADS, KV_HEADS, WIDTH = 6, 2, 8
LENGTHS = (70, 1, 130)
"""Of documents; a block has 64 queries."""
EXACT = 1e-12
SIGMAS = 6.0


def splitmix(z: np.ndarray) -> np.ndarray:
    """The hash as its authors have it (Steele et al. 2014), of unsigned 64-bit numbers, beside a factor first."""
    z = z * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def plain_mask(keys: Tensor, seed: int, heads: range) -> Tensor:
    """`[heads, t, t]`: of the seed of a block, a head, the query's token and the key's one after the other."""
    tokens = keys.numpy().astype(np.uint64)
    with np.errstate(over="ignore"):
        of_heads = splitmix(np.array(heads, dtype=np.uint64) + np.uint64(seed)) >> np.uint64(1)
        rows = splitmix(tokens + of_heads[:, None])
        bits = splitmix(rows[:, :, None] + tokens) >> np.uint64(40)
    return torch.from_numpy(bits.astype(np.float64) * 2.0**-24 >= RATE)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, documents: Tensor, window: int | None) -> Tensor:
    """Scores of all pairs, and softmax over those that are seen. `[t, heads, d]` each."""
    places = torch.arange(q.shape[0])
    seen = (documents[:, None] == documents) & (places[:, None] >= places)
    if window is not None:
        seen &= places[:, None] - places < window
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("rnd,cnd->nrc", q, k) / q.shape[2] ** 0.5
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
    return torch.einsum("nrc,cnd->rnd", weights * mask / (1 - RATE), v)


def stream() -> tuple[list[Tensor], Documents, Tensor]:
    """Operands, documents with keys from anywhere in a long run, and the document of each token."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((sum(LENGTHS), heads, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS))
    operands = [torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]
    borders = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    keys = torch.arange(sum(LENGTHS)) + 2**40
    which = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    return operands, Documents(positions, borders, max(LENGTHS), keys), which


@pytest.mark.parametrize("window", [None, 50])
def test_plain_attention_with_the_same_mask(window):
    """Forward and gradients in float64, with grouped heads, a window and packed documents, on both of two ranks that
    share the heads."""
    (q, k, v), documents, which = stream()
    mask = plain_mask(documents.keys, name_seed(7, "here"), range(HEADS))
    wanted = plain_attention(q, k, v, mask, which, window)
    grad = torch.randn(wanted.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    truth = torch.autograd.grad(wanted, (q, k, v), grad)
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        axis = Axis("tp", size, rank, None, tuple(range(size)))
        dropping = DroppingAttention(
            partial(attend_spelled_out, ScoreOptions(drop_rate=RATE)),
            seed=7,
            site="here",
            num_heads=HEADS // size,
            tp=axis,
        )
        own, of_keys = (slice(rank * n // size, (rank + 1) * n // size) for n in (HEADS, KV_HEADS))
        seeds = dropping.head_seeds(q.device)
        found = dropping.attend(q[:, own], k[:, of_keys], v[:, of_keys], documents, window, head_seeds=seeds)
        assert (found - wanted[:, own]).abs().max() < EXACT
        for each, other, heads in zip(
            torch.autograd.grad(found, (q, k, v), grad[:, own]), truth, (own, of_keys, of_keys), strict=True
        ):
            assert (each[:, heads] - other[:, heads]).abs().max() < EXACT


def test_masks_are_as_good_as_chance():
    """As many pairs are dropped as the rate says, and no two queries, heads, keys or tokens of neighbouring steps drop
    the same more often than chance has it."""
    tokens = torch.arange(300) + 12345
    kept = kept_pairs(tokens, tokens, torch.tensor([name_seed(1, "a"), name_seed(1, "b")]), RATE)
    later = kept_pairs(tokens + 1, tokens + 1, torch.tensor([name_seed(1, "a")]), RATE)
    number, spread = kept[0].numel(), math.sqrt(RATE * (1 - RATE))
    assert abs(kept[0].double().mean() - (1 - RATE)) < SIGMAS * spread / number**0.5
    apart = (kept.double() - (1 - RATE)) / spread
    pairs = {
        "heads": apart[0] * apart[1],
        "queries": apart[0, 1:] * apart[0, :-1],
        "keys": apart[0, :, 1:] * apart[0, :, :-1],
        "both": apart[0, 1:, 1:] * apart[0, :-1, :-1],
        "who asks whom": apart[0].triu(1) * apart[0].T.triu(1) * 2**0.5,
    }
    for name, products in pairs.items():
        assert abs(products.mean()) < SIGMAS / products.numel() ** 0.5, name
    assert torch.equal(later[0, :-1, :-1], kept[0, 1:, 1:]), "tokens decide, not places"


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (["parallel.cp=2", "parallel.cp_kind=ring"], "parallel.cp_kind: ring drops no weights"),
        (["train.flash_attention=fa3", "precision.dtype=bf16"], "train.flash_attention: fa3 takes no mask"),
    ],
)
def test_what_cannot_drop_is_refused(tmp_path, settings, complaint):
    """By name, before anything is built."""
    path = tmp_path / "run.yaml"
    path.write_text("train: {steps: 1}\nmodel: {vocab_size: 101, attention_dropout: 0.1}\n")
    config = load_config(path, settings)
    with pytest.raises(ConfigError) as caught:
        validate(config, default_world_size(config))
    assert complaint in str(caught.value)
