"""The codes of 8-bit state, against torch's binary search."""

from __future__ import annotations

import pytest
import torch

from megalite.optim.quantize import _table, pack, unpack, zeros


@pytest.mark.parametrize("signed", [True, False])
def test_nearest_is_the_binary_search(signed: bool):
    """For numbers with every upper half of bits there is, for the borders and their neighbours, and at random."""
    table = _table(signed, torch.device("cpu"))
    borders = table._borders[:-1]
    halves = (torch.arange(2**16, dtype=torch.int32) << 16).unsqueeze(1)
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0xFFFE, 0xFFFF], dtype=torch.int32)
    numbers = (halves | lower).view(torch.float32).reshape(-1)
    torch.manual_seed(0)
    numbers = torch.cat(
        [
            numbers[numbers.isfinite()],
            *(torch.nextafter(borders, torch.tensor(to)) for to in (-2.0, 2.0)),
            torch.rand(10**6) * 2 - 1,
            torch.randn(10**6) * 1e-6,
        ]
    )
    assert torch.equal(table.nearest(numbers).long(), torch.bucketize(numbers, borders))


@pytest.mark.parametrize("signed", [True, False])
def test_packing_again_changes_nothing(signed: bool):
    """What was unpacked is packed to the same bits, also zeros, tiny numbers, and a last block that is not full."""
    torch.manual_seed(0)
    numbers = torch.randn(1000) * 10.0 ** torch.randint(-12, 3, (1000,))
    numbers[300:600] = 0.0
    numbers = numbers if signed else numbers.abs()
    once, twice = (zeros(1000, signed=signed, device=torch.device("cpu")) for _ in range(2))
    pack(numbers, once)
    pack(unpack(once), twice)
    assert torch.equal(once.codes, twice.codes)
    assert torch.equal(once.scales, twice.scales)
