"""What the update of the weights has beside weights, gradients and state, on a rank of each stage.

Rules work one after the other, so it is the most that any has. A number of a rule is one that a rank updates: its part
of what the replicas share.
"""

from __future__ import annotations

from functools import lru_cache

from megalite.architecture.architecture import Architecture
from megalite.architecture.costs import ELEMENT_BYTES, FP32_BYTES
from megalite.architecture.weights import Weight, weight_table
from megalite.config.engine import choose_engine
from megalite.config.optimizers import FROZEN, RULES, UpdateRule
from megalite.config.plan import RunPlan
from megalite.config.schema import Config, OptimizerConfig
from megalite.optim.at_work import CHUNK, Formats, Shape, elementwise_bytes, whole_bytes
from megalite.optim.rules import all_rules, rows_of_unit, rule_of
from megalite.planner.holdings import MOST_KEPT, updated_by_stage


def update_bytes_by_stage(config: Config, plan: RunPlan) -> tuple[int, ...]:
    """Bytes at most, stage after stage."""
    optimizer, is_coupled = config.optimizer, config.optimizer.decay.kind == "coupled"
    moving = [name for name in all_rules(optimizer) if name != FROZEN]
    names = [name for name in moving if (rule := RULES[name]).work or rule.results_beside or is_coupled]
    found, formats = [0] * plan.pp, _formats(config, plan)
    for name in names:
        of_stages = updated_by_stage(plan, name, optimizer)
        of_rule = (_of_rule(config, plan, name, numbers, formats) for numbers in of_stages)
        found = list(map(max, found, of_rule))
    return tuple(found)


def _of_rule(config: Config, plan: RunPlan, name: str, numbers: int, formats: Formats) -> int:
    """Of a rule, given what a stage's replicas update by it together, for one tp rank."""
    rule, is_coupled = RULES[name], config.optimizer.decay.kind == "coupled"
    shards = plan.num_replicas // config.parallel.dp_replicate if plan.sharding.optimizer else 1
    if not numbers:
        return 0
    mine = -(-numbers // shards)
    if rule.work is None:
        return elementwise_bytes(rule, mine, is_coupled=is_coupled)
    units = _units(plan.model, config.optimizer, name)
    return whole_bytes(rule, mine, units, plan.tp * shards, formats, is_coupled=is_coupled)


def _formats(config: Config, plan: RunPlan) -> Formats:
    precision = config.precision
    return Formats(
        product=FP32_BYTES if precision.dtype == "fp32" else ELEMENT_BYTES["bf16"],
        gradient=ELEMENT_BYTES[precision.master_dtype],
        chunk=CHUNK["cpu" if config.train.device == "cpu" else "cuda"],
        longest_turned=config.optimizer.max_precondition_dim,
        cuts_units=plan.tp > 1 or choose_engine(config) == "fsdp2",  # the others cut all weights in a row
    )


@lru_cache(maxsize=MOST_KEPT)
def _units(model: Architecture, optimizer: OptimizerConfig, name: str) -> tuple[Shape, ...]:
    """Shapes of a rule's units, each once."""
    rule = RULES[name]
    mine = (weight for weight in weight_table(model).values() if rule_of(weight, optimizer) == name)
    return tuple({unit for weight in mine for unit in _units_of(weight, rule)})


def _units_of(weight: Weight, rule: UpdateRule) -> set[Shape]:
    if not rule.in_rows:
        return {weight.shape}
    rows, (whole, *others) = rows_of_unit(weight), weight.shape
    return {(size, *others) for size in (min(rows, whole), whole % rows) if size}
