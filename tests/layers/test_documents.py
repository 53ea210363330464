"""What the layers know of a stream's documents."""

from __future__ import annotations

import torch

from megalite.layers.documents import Documents


def lengths(borders: list[int]) -> list[int]:
    positions = torch.zeros(borders[-1], dtype=torch.int64)
    return Documents(positions, torch.tensor(borders, dtype=torch.int32), borders[-1], positions).lengths


def test_lengths_leave_out_padding():
    """Lengths are those of the documents; borders repeated at the end, as a pipeline pads them, add none."""
    assert lengths([0, 3, 4, 10]) == [3, 1, 6]
    assert lengths([0, 3, 4, 10, 10, 10]) == [3, 1, 6]
    assert lengths([0, 10]) == [10]
