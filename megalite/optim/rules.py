"""Which rule updates a weight, and what that rule keeps of it: `config.optimizers` read for a weight. No torch."""

from __future__ import annotations

from math import prod

from megalite.addition import load
from megalite.architecture.weights import Weight
from megalite.config.optimizers import FROZEN, MOMENTS, OPTIMIZERS, RULES, UpdateRule
from megalite.config.schema import OptimizerConfig
from megalite.config.weight_groups import group_of

FACTORS = ("exp_avg_sq_row", "exp_avg_sq_col")

SOAP_SIDES = (("covariance_row", "basis_row"), ("covariance_col", "basis_col"))
"""Of SOAP: for the rows' side of a matrix and for the columns', the mean of products of gradients, and its basis."""

BLOCK_SIZE = 256
"""Numbers of a weight, read row by row, that share a scale in 8 bits."""

UNIT_NUMBERS = 2**24
"""Of adamw8bit and lion8bit: whole rows with about so many numbers are one rank's: a large table has many owners."""


def rule_of(weight: Weight, optimizer: OptimizerConfig) -> str:
    """Name of the rule that updates a weight."""
    group = group_of(weight.name, optimizer)
    if group is not None and group.frozen:
        return FROZEN
    names = OPTIMIZERS[(group and group.optimizer) or optimizer.name]
    if not weight.is_matrix:
        return names.vectors
    return names.matrices if weight.is_inner else names.tables


def all_rules(optimizer: OptimizerConfig) -> tuple[str, ...]:
    """Names of the rules that some weight may have, each once; that of the blocks' matrices comes first."""
    names = [rule for name in optimizer.names for rule in OPTIMIZERS[name].rules]
    frozen = [FROZEN] if any(group.frozen for group in optimizer.groups) else []
    return tuple(dict.fromkeys(names + frozen))


def state_shapes(weight: Weight, optimizer: OptimizerConfig) -> dict[str, tuple[int, ...]]:
    """What a checkpoint holds of a weight beside itself: shapes by kind."""
    return _shapes(RULES[rule_of(weight, optimizer)], weight, optimizer)


def _shapes(rule: UpdateRule, weight: Weight, optimizer: OptimizerConfig) -> dict[str, tuple[int, ...]]:
    make, whole = rule.whole_state, dict[str, tuple[int, ...]]()
    if isinstance(make, str):
        whole = load(make)(weight, optimizer)
    elif make is not None:
        whole = make(weight)
    return {**dict.fromkeys(rule.state, weight.shape), **whole}


def state_kinds() -> tuple[str, ...]:
    """All kinds of state that a checkpoint may have: those of every rule, for a matrix and for a vector."""
    weights = [Weight("", shape, "", "") for shape in ((1, 1), (1,))]
    default = OptimizerConfig()
    kinds = (kind for rule in RULES.values() for weight in weights for kind in _shapes(rule, weight, default))
    return tuple(dict.fromkeys(kinds))


def state_bytes(weight: Weight, optimizer: OptimizerConfig) -> int:
    """Memory that the state of a whole weight takes over all ranks that share it."""
    rule = RULES[rule_of(weight, optimizer)]
    if rule.state_bytes is not None:
        return load(rule.state_bytes)(weight)
    return 4 * sum(prod(shape) for shape in state_shapes(weight, optimizer).values())


def update_multiply_adds(weight: Weight, optimizer: OptimizerConfig) -> float:
    """Of a step's products of a whole weight, over all ranks that share it."""
    function = RULES[rule_of(weight, optimizer)].multiply_adds
    return 0.0 if function is None else load(function)(weight, optimizer)


def orthogonal_multiply_adds(weight: Weight, optimizer: OptimizerConfig) -> float:
    """Of Newton-Schulz iterations: a matrix with itself, that with itself, and with the matrix."""
    short, long = sorted(weight.shape)
    return float(optimizer.newton_schulz_steps * short * short * (2 * long + short))


QR_COST = 4.0
"""Of the decomposition of a square matrix, in products of two of its size."""


def soap_multiply_adds(weight: Weight, optimizer: OptimizerConfig) -> float:
    """Of SOAP, for each side that has a basis: a square of the gradient, three matrices turned, and now and then its
    iteration."""
    rows, columns = weight.shape
    turned = [side for side in weight.shape if side <= optimizer.max_precondition_dim]
    refreshed = sum((1.0 + QR_COST) * side**3 for side in turned) / optimizer.precondition_every
    return rows * columns * 4.0 * sum(turned) + refreshed


def factored_shapes(weight: Weight, optimizer: OptimizerConfig) -> dict[str, tuple[int, ...]]:
    """Adafactor's second moment: a row and a column of a matrix, all of a vector."""
    if len(weight.shape) > 1:
        return dict(zip(FACTORS, (weight.shape[:1], weight.shape[1:]), strict=True))
    return {"exp_avg_sq": weight.shape}


def soap_shapes(weight: Weight, optimizer: OptimizerConfig) -> dict[str, tuple[int, ...]]:
    """SOAP's two moments of a matrix, the second one in the bases, and of each side that is turned two squares."""
    shapes = dict.fromkeys(("exp_avg", "exp_avg_sq_turned"), weight.shape)
    for side, kinds in zip(weight.shape, SOAP_SIDES, strict=False):
        if side <= optimizer.max_precondition_dim:
            shapes |= dict.fromkeys(kinds, (side, side))
    return shapes


def unpacked_shapes(weight: Weight, optimizer: OptimizerConfig) -> dict[str, tuple[int, ...]]:
    """The moments of adamw8bit as checkpoints hold them."""
    return dict.fromkeys(MOMENTS, weight.shape)


def packed_bytes(weight: Weight) -> int:
    """The same as adamw8bit keeps them: two codes a number, and two scales a block."""
    row, rows = prod(weight.shape[1:]), rows_of_unit(weight)
    whole, rest = divmod(weight.shape[0], rows)
    blocks = whole * -(-rows * row // BLOCK_SIZE) + -(-rest * row // BLOCK_SIZE)
    return 2 * prod(weight.shape) + 2 * 4 * blocks


def momentum_shapes(weight: Weight, optimizer: OptimizerConfig) -> dict[str, tuple[int, ...]]:
    """The momentum of muon8bit as checkpoints hold it, which is Muon's."""
    return {"momentum": weight.shape}


def mean_shapes(weight: Weight, optimizer: OptimizerConfig) -> dict[str, tuple[int, ...]]:
    """The momentum of lion8bit as checkpoints hold it, which is Lion's."""
    return {"exp_avg": weight.shape}


def packed_matrix_bytes(weight: Weight) -> int:
    """What muon8bit keeps: a code a number, and a scale a block."""
    return prod(weight.shape) + 4 * -(-prod(weight.shape) // BLOCK_SIZE)


def packed_rows_bytes(weight: Weight) -> int:
    """What lion8bit keeps: half of adamw8bit's."""
    return packed_bytes(weight) // 2


def unit_rows(weight: Weight) -> list[tuple[int, int]]:
    """The runs of rows, first and one past the last, that are one unit of adamw8bit and lion8bit, in every layout."""
    rows = rows_of_unit(weight)
    return [(start, min(start + rows, weight.shape[0])) for start in range(0, weight.shape[0], rows)]


def rows_of_unit(weight: Weight) -> int:
    """Rows of each of them but the last, which may be shorter."""
    return max(1, UNIT_NUMBERS // prod(weight.shape[1:]))
