"""Which rule updates a weight, and what that rule keeps of it. Pure arithmetic, no torch.

    optimizer   matrices of the blocks   tables and head   norms, biases     kept for each number of a matrix
    adamw       adamw                    adamw             adamw             two moments, 8 bytes
    adamw8bit   adamw8bit                adamw8bit         adamw             two codes and two scales a block, 2 bytes
    lion        lion                     lion              lion              momentum, 4 bytes
    adafactor   adafactor                adafactor         adafactor         a row and a column, next to nothing
    muon        muon                     adamw             adamw             momentum, 4 bytes
    sgd         sgd                      sgd               sgd               momentum, 4 bytes

State that has a number for every number of the weight is cut as the weight is, by tp and by ZeRO. adafactor's factors
and adamw8bit's blocks are not such: they are kept for whole rows or whole weights, by one rank (`exchange`). In a
checkpoint both are tensors named after their canonical weight, in fp32; adamw8bit saves its moments unpacked, so that a
run may go on with adamw and back, and packing them again gives the same bits.
"""

from __future__ import annotations

from math import prod

from megalite.architecture.weights import Weight
from megalite.config.schema import OptimizerConfig
from megalite.config.sections.optimizer import OptimizerName

ELEMENTWISE_KINDS: dict[str, tuple[str, ...]] = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adamw8bit": (),
    "lion": ("exp_avg",),
    "adafactor": (),
    "muon": ("momentum",),
    "sgd": ("momentum",),
}
"""State with a number for each number of the weight, by its name in checkpoints."""

STATE_KINDS = ("exp_avg", "exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col", "momentum")
"""All kinds of state that there are."""

BLOCK_SIZE = 256
"""Numbers of a weight, read row by row, that share a scale in adamw8bit."""

UNIT_NUMBERS = 2**24
"""Of adamw8bit: whole rows with about this many numbers are one rank's, so that a large table has many owners."""


def rule_of(weight: Weight, optimizer: OptimizerConfig) -> OptimizerName:
    """The rule that updates a weight."""
    is_matrix = len(weight.shape) > 1
    if optimizer.name == "muon":
        return "muon" if is_matrix and weight.layer.startswith("blocks.") else "adamw"
    if optimizer.name == "adamw8bit":
        return "adamw8bit" if is_matrix else "adamw"
    return optimizer.name


def state_shapes(weight: Weight, optimizer: OptimizerConfig) -> dict[str, tuple[int, ...]]:
    """What a checkpoint holds of a weight beside itself: shapes by kind."""
    rule = rule_of(weight, optimizer)
    if rule == "adafactor" and len(weight.shape) > 1:
        return {"exp_avg_sq_row": weight.shape[:1], "exp_avg_sq_col": weight.shape[1:]}
    if rule == "adafactor":
        return {"exp_avg_sq": weight.shape}
    kinds = ELEMENTWISE_KINDS["adamw" if rule == "adamw8bit" else rule]
    return dict.fromkeys(kinds, weight.shape)


def state_bytes(weight: Weight, optimizer: OptimizerConfig) -> int:
    """Memory that the state of a whole weight takes over all ranks that share it."""
    if rule_of(weight, optimizer) != "adamw8bit":
        return 4 * sum(prod(shape) for shape in state_shapes(weight, optimizer).values())
    blocks = sum(-(-prod((stop - start, *weight.shape[1:])) // BLOCK_SIZE) for start, stop in unit_rows(weight))
    return 2 * prod(weight.shape) + 2 * 4 * blocks


def unit_rows(weight: Weight) -> list[tuple[int, int]]:
    """The runs of rows, first and one past the last, that adamw8bit treats as one; the same in every layout."""
    rows = max(1, UNIT_NUMBERS // prod(weight.shape[1:]))
    return [(start, min(start + rows, weight.shape[0])) for start in range(0, weight.shape[0], rows)]
