"""Dropout masks as a pure function of seed, token and channel."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from megalite.parallel.random import dropout, name_seed

RATE = 0.1
SEED = name_seed(1234, "blocks.0.mlp")
TOKENS, CHANNELS = 512, 256

SIGMAS = 5.0
"""A binomial count farther than this from its mean happens once in two million draws; the draws here are fixed."""

SMALLEST_P_VALUE = 1e-4
"""Of a chi-square statistic; the draws are fixed, so this cannot fail by bad luck."""


GOLDEN_MASKS = ["1000101011000011", "0000000010011101"]
"""Which of 16 channels stay at rate 0.5, for keys 0 and 2**40 and the embedding"s site under seed 0."""

GOLDEN_SEEDS = {
    (1234, "embedding.weight"): 8310793017932404649,
    (1234, "blocks.0.attention.q.weight"): 7381278581423925567,
    (0, ""): 1373089790506818604,
}
"""`name_seed` of a seed and a name."""


def kept(keys: Tensor, *, rate: float = RATE, seed: int = SEED, channels: int = CHANNELS, first: int = 0) -> Tensor:
    """Boolean mask `[tokens, channels]` of what stays."""
    return dropout(torch.ones(len(keys), channels), keys, rate=rate, seed=seed, first_channel=first) != 0


def assert_binomial(count: int, trials: int, probability: float) -> None:
    deviation = (trials * probability * (1 - probability)) ** 0.5
    assert abs(count - trials * probability) <= SIGMAS * deviation, (count, trials * probability, deviation)


KEYS = torch.arange(TOKENS) + 10**12
"""A run of tokens deep in a long training."""


@pytest.mark.parametrize("tp", [2, 4])
def test_mask_is_independent_of_the_channel_cut(tp):
    """A rank that holds some channels drops what the whole layer drops in them."""
    part = CHANNELS // tp
    parts = [kept(KEYS, channels=part, first=rank * part) for rank in range(tp)]
    assert torch.equal(torch.cat(parts, dim=1), kept(KEYS))


def test_mask_is_independent_of_the_token_cut():
    """Any split into micro-batches, or over sequence-parallel ranks, gives every token its own mask."""
    for sizes in ((256, 256), (1, 511), (128,) * 4, (100, 300, 112)):
        assert torch.equal(torch.cat([kept(keys) for keys in KEYS.split(sizes)]), kept(KEYS))


def test_mask_is_independent_of_order():
    """A permuted stream has the permuted mask."""
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(0))
    assert torch.equal(kept(KEYS[order]), kept(KEYS)[order])


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_rate_is_nominal(rate):
    """The share of dropped elements is the rate, within a binomial bound."""
    mask = kept(KEYS, rate=rate)
    assert_binomial(int(mask.sum()), mask.numel(), 1 - rate)


def test_rate_is_nominal_for_every_channel_and_token():
    """No channel and no token is dropped more often than chance allows, the first and last ones included."""
    mask = kept(KEYS)
    for counts, trials in ((mask.sum(0), TOKENS), (mask.sum(1), CHANNELS)):
        assert_binomial(int(counts.min()), trials, 1 - RATE)
        assert_binomial(int(counts.max()), trials, 1 - RATE)


@pytest.mark.parametrize("shift", [1, 2, 64, 2**32])
def test_neighbouring_keys_are_independent(shift):
    """Two tokens whose keys differ by a little agree as often as independent coins do."""
    for rate in (0.1, 0.5):
        both = kept(KEYS, rate=rate) & kept(KEYS + shift, rate=rate)
        assert_binomial(int(both.sum()), both.numel(), (1 - rate) ** 2)


def test_neighbouring_channels_are_independent():
    """Two channels side by side agree as often as independent coins do."""
    mask = kept(KEYS, rate=0.5)
    both = mask[:, ::2] & mask[:, 1::2]
    assert_binomial(int(both.sum()), both.numel(), 0.25)


def test_sites_and_seeds_are_independent():
    """Two dropout sites of a model, and one site under two seeds, drop other channels."""
    first = kept(KEYS, rate=0.5)
    for seed in (name_seed(1234, "blocks.1.mlp"), name_seed(1235, "blocks.0.mlp"), SEED + 2**40):
        both = first & kept(KEYS, rate=0.5, seed=seed)
        assert_binomial(int(both.sum()), both.numel(), 0.25)


def test_underlying_numbers_are_uniform():
    """The masks of 15 rates nest, and the counts between them pass a chi-square test against equal shares."""
    masks = [kept(KEYS, rate=number / 16) for number in range(1, 16)]
    for loose, tight in itertools.pairwise(masks):
        assert bool((tight <= loose).all())
    above = torch.tensor([KEYS.numel() * CHANNELS, *(int(mask.sum()) for mask in masks), 0], dtype=torch.float64)
    counts = above[:-1] - above[1:]
    expected = KEYS.numel() * CHANNELS / 16
    chi_square = ((counts - expected) ** 2 / expected).sum()
    p_value = torch.special.gammaincc(torch.tensor(15 / 2, dtype=torch.float64), chi_square / 2).item()
    assert p_value > SMALLEST_P_VALUE, counts.tolist()


def test_kept_elements_are_scaled():
    """What stays is divided by 1 - rate, so that the mean stays, and so is its gradient; what is dropped has none."""
    x = torch.randn(TOKENS, CHANNELS, generator=torch.Generator().manual_seed(0)).requires_grad_()
    y = dropout(x, KEYS, rate=0.25, seed=SEED)
    y.sum().backward()
    mask = kept(KEYS, rate=0.25)
    torch.testing.assert_close(y.detach(), x.detach() * mask / 0.75)
    torch.testing.assert_close(x.grad, mask / 0.75)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_mask_is_independent_of_the_format(dtype):
    """Every number format drops the same elements and keeps its format."""
    y = dropout(torch.ones(TOKENS, CHANNELS, dtype=dtype), KEYS, rate=RATE, seed=SEED)
    assert y.dtype == dtype
    assert torch.equal(y != 0, kept(KEYS))


def test_rate_zero_keeps_everything():
    """Without a rate the stream passes unchanged."""
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(dropout(x, KEYS[:8], rate=0.0, seed=SEED), x)


def test_mask_is_a_golden_value():
    """The masks of two tokens, recorded once: a change would alter every run with dropout on its next resume."""
    mask = kept(torch.tensor([0, 2**40]), rate=0.5, channels=16, seed=name_seed(0, "embedding"))
    assert ["".join("01"[bit] for bit in row) for row in mask.tolist()] == GOLDEN_MASKS


def test_name_seeds_are_golden_values():
    """Seeds of names, recorded once: initial weights and masks are the same on every machine and in every release."""
    assert {key: name_seed(*key) for key in GOLDEN_SEEDS} == GOLDEN_SEEDS
    assert all(0 <= value < 2**63 for value in GOLDEN_SEEDS.values())


def test_name_seeds_do_not_run_together():
    """A seed and a name that spell the same digits differently have other seeds."""
    assert name_seed(1, "2/x") != name_seed(12, "x")
    assert len({name_seed(seed, f"blocks.{block}.mlp") for seed in range(50) for block in range(50)}) == 2500
