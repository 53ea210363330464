"""Which canonical weights a run with `precision.qat` rounds. No torch: checks, memory, training and export ask here."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.architecture.architecture import Architecture
from megalite.architecture.weights import Weight, weight_table
from megalite.config.schema import QatConfig

UNROUNDED = (".mlp.router.", ".mlp.shared_gate.")
"""Matrices of a block that are no linear layer's: they choose, and are a thousandth of its size."""


def rounded_blocks(qat: QatConfig, num_layers: int) -> range:
    """Blocks of the model whose weights are rounded; not those that predict further ahead, which no export needs."""
    return range(qat.keep_first_blocks, num_layers - qat.keep_last_blocks)


def is_rounded(weight: Weight, qat: QatConfig, num_layers: int) -> bool:
    """Whether a weight is one of those: a matrix `[out, in]` of a linear layer or an expert, in such a block."""
    room, _, index = weight.layer.partition(".")
    if room != "blocks" or len(weight.shape) != 2 or any(part in weight.name for part in UNROUNDED):
        return False
    return int(index) in rounded_blocks(qat, num_layers)


def rounded_weights(qat: QatConfig, model: Architecture) -> Iterator[Weight]:
    """All of them, of a filled model."""
    return (each for each in weight_table(model).values() if is_rounded(each, qat, model.num_layers))
