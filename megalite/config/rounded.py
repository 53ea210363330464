"""Which canonical weights a run with `precision.qat`, `fp4` or `fp8` rounds. No torch: checks, memory, training and
export ask here."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.architecture.architecture import Architecture
from megalite.architecture.weights import Weight, is_linear, weight_table
from megalite.config.schema import Fp4Config, Fp8Config, QatConfig


def rounded_blocks(qat: QatConfig, num_layers: int) -> range:
    """Blocks of the model whose weights are rounded; not those that predict further ahead, which no export needs."""
    return range(qat.keep_first_blocks, num_layers - qat.keep_last_blocks)


def is_rounded(weight: Weight, qat: QatConfig, num_layers: int) -> bool:
    """Whether a weight is one of those: a matrix `[out, in]` of a linear layer or an expert, in such a block."""
    return is_linear(weight) and int(weight.layer.partition(".")[2]) in rounded_blocks(qat, num_layers)


def rounded_weights(qat: QatConfig, model: Architecture) -> Iterator[Weight]:
    """All of them, of a filled model."""
    return (each for each in weight_table(model).values() if is_rounded(each, qat, model.num_layers))


def is_in_fp4(weight: Weight, fp4: Fp4Config, num_layers: int) -> bool:
    """Whether a weight's products are in FP4: it is a matrix that tensor parallelism may cut, in such a block."""
    return _is_cut_within(weight, fp4.rounded_blocks(num_layers))


def kept_fp4_bytes(fp4: Fp4Config) -> int:
    """Of a number of such a weight, as it is kept rounded for a step: fp32, for one pass or both."""
    full = fp4.filled
    is_kept_again = not full.square_weights and full.stochastic_rounding != "backward"
    return 4 * (bool(full.forward or full.square_weights) + is_kept_again)


KEPT_FP8_BYTES = {"current": 1.0, "delayed": 1.0, "block": 1.0, "rowwise": 2.0, "mxfp8": 2 * (1 + 4 / 32)}
"""Of a number of a weight that is kept rounded for a step, by recipe: twice where what shares a scale is another piece
of the transposed matrix, and with the scales where these are many."""


def kept_fp8_bytes(weight: Weight, fp8: Fp8Config, num_layers: int) -> float:
    """Bytes that each number of a weight takes, rounded, beside the weight: by our own backends; matrices of experts
    are rounded for each use."""
    within = range(fp8.bf16_first_blocks, num_layers - fp8.bf16_last_blocks)
    is_kept = fp8.backend != "te" and weight.expert is None and _is_cut_within(weight, within)
    return KEPT_FP8_BYTES[fp8.recipe] if is_kept else 0.0


def _is_cut_within(weight: Weight, blocks: range) -> bool:
    """Whether a weight is a matrix that tensor parallelism may cut, in one of these blocks of the model."""
    room, _, index = weight.layer.partition(".")
    return room == "blocks" and weight.is_matrix and weight.cut is not None and int(index) in blocks
