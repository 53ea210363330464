"""What the ranks of each pipeline stage hold: parameters, what is updated of them, state, rounded weights.

All of it are sums over the table of weights, by layer and then by stage, exact, before ZeRO cuts anything.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import prod

from megalite.architecture.architecture import Architecture
from megalite.architecture.costs import ELEMENT_BYTES, sum_by_layer
from megalite.architecture.weights import Weight, weight_table
from megalite.config.engine import choose_engine
from megalite.config.optimizers import FROZEN, RULES
from megalite.config.plan import RunPlan, has_embedding_copy
from megalite.config.rounded import is_in_fp4, is_rounded, kept_fp4_bytes, kept_fp8_bytes
from megalite.config.schema import Config, OptimizerConfig
from megalite.config.trained import trained_layers
from megalite.engine.kept import EngineNumbers
from megalite.optim.rules import all_rules, rule_of, state_bytes
from megalite.optim.rules import update_multiply_adds as rule_multiply_adds

MOST_KEPT = 256
"""Models and layouts whose sums are remembered: a search asks for the same again and again."""


def numbers_by_stage(config: Config, plan: RunPlan) -> tuple[EngineNumbers, ...]:
    """What the engine of each stage is given to keep, before ZeRO."""
    held, updated, states = parameters_by_stage(plan), _updated_by_stage(plan), _state_bytes_by_stage(config, plan)
    still = tuple((0,) * plan.pp for _ in range(2))
    if choose_engine(config) != "deepspeed":
        still = _still_by_stage(config, plan, plan.ep), _still_by_stage(config, plan, _ep_of_updated(plan))
    return tuple(map(EngineNumbers, held, updated, states, *still))


def parameters_by_stage(plan: RunPlan) -> tuple[int, ...]:
    """Parameters that one rank of each stage allocates, before ZeRO: exact, from the table of weights."""
    return _by_stage(plan, _parameters(plan.model, plan.tp, plan.ep))


def _updated_by_stage(plan: RunPlan) -> tuple[int, ...]:
    """Parameters whose masters and states the replicas of each stage have together, for one tp rank: where ZeRO divides
    them those of all experts, else those of a rank's own."""
    return _by_stage(plan, _parameters(plan.model, plan.tp, _ep_of_updated(plan)))


def updated_by_stage(plan: RunPlan, rule: str, optimizer: OptimizerConfig) -> tuple[int, ...]:
    """Of these, the numbers of weights that a rule updates."""
    return _by_stage(plan, _numbers_of_rule(plan.model, plan.tp, _ep_of_updated(plan), rule, optimizer))


def _state_bytes_by_stage(config: Config, plan: RunPlan) -> tuple[int, ...]:
    """Bytes of the optimizer state of these."""
    return _by_stage(plan, _state_bytes(plan.model, plan.tp, _ep_of_updated(plan), config.optimizer))


def update_multiply_adds(config: Config, plan: RunPlan) -> float:
    """Products of the optimizer's rules in a step, of the rank that has most: matrices are shared out whole over the
    ranks that have parts of them."""
    if not any(RULES[name].multiply_adds for name in all_rules(config.optimizer)):
        return 0.0
    stages = _by_stage(plan, _update_multiply_adds(plan.model, config.optimizer))
    sharers = plan.tp * (plan.num_replicas if plan.sharding.optimizer else 1)
    return max(max(stages) / sharers, _largest_update(plan.model, config.optimizer))


def _ep_of_updated(plan: RunPlan) -> int:
    """Over how many ranks experts are dealt out, of what a stage's replicas update together."""
    return 1 if plan.sharding.optimizer else plan.ep


def _still_by_stage(config: Config, plan: RunPlan, ep: int) -> tuple[int, ...]:
    """Numbers of parameters of which all stays as it is, each of which holds weights that are frozen alone.

    Args:
        ep: over how many ranks experts are dealt out.
    """
    if not any(group.frozen for group in config.optimizer.groups):
        return (0,) * plan.pp
    return _by_stage(plan, _still(plan.model, plan.tp, ep, config.optimizer))


def num_still_below(config: Config, plan: RunPlan) -> int:
    """Blocks of the first chunk that no gradient goes down to: what is beneath is frozen, and so are they."""
    optimizer = config.optimizer
    if (
        not any(group.frozen for group in optimizer.groups) or choose_engine(config) == "deepspeed"
    ):  # which goes down to all
        return 0
    stage, (first, stop) = plan.chunk_ranks[0], plan.chunk_blocks[0]
    mine = {"embedding", *(f"blocks.{index}" for index in plan.blocks_of(stage))}
    if plan.chunk_ranks[-1] == stage:
        mine |= {"final_norm", "head"}
    trained = mine & trained_layers(plan.model, optimizer)
    if "embedding" in trained:
        return 0
    if not trained:  # a stage goes down to one of its last parameters all the same (`engine.still`)
        return stop - first - 1
    return next((index for index in range(first, stop) if f"blocks.{index}" in trained), stop) - first


def rounded_bytes_by_stage(config: Config, plan: RunPlan) -> tuple[int, ...]:
    """Bytes of the rounded weights that a rank of each stage keeps for a step, beside those that are trained."""
    qat, fp4, fp8 = config.precision.qat, config.precision.fp4, config.precision.fp8
    num_layers, element = plan.model.num_layers, ELEMENT_BYTES[config.precision.dtype]
    if (qat is None and fp4 is None and fp8 is None) or plan.sharding.weights:
        return (0,) * plan.pp

    def bytes_of_number(weight: Weight) -> float:
        if fp8 is not None:
            return kept_fp8_bytes(weight, fp8, num_layers)
        if fp4 is not None:
            return kept_fp4_bytes(fp4) if is_in_fp4(weight, fp4, num_layers) else 0
        return element if qat is not None and is_rounded(weight, qat, num_layers) and weight.is_held(plan.ep, 0) else 0

    def measure(weight: Weight) -> int:
        return round(prod(weight.local_shape(plan.tp)) * bytes_of_number(weight))

    return _by_stage(plan, _by_layer(plan.model, measure, by_name=True))


def state_bytes_per_parameter(config: Config, plan: RunPlan) -> float:
    """Bytes of optimizer state over the whole model, for each of its parameters; master weights not counted."""
    by_name = bool(config.optimizer.groups)
    states = sum_by_layer(plan.model, lambda weight: state_bytes(weight, config.optimizer), by_name=by_name)
    return sum(states.values()) / sum(sum_by_layer(plan.model, lambda weight: prod(weight.shape)).values())


Sizes = dict[str, int]
"""Of what a rank has of each layer; not to be written to."""

AT_HEAD = "embedding, at the head"
"""Their key of the table that first and last stage both have."""


@lru_cache(maxsize=MOST_KEPT)
def _parameters(model: Architecture, tp: int, ep: int) -> Sizes:
    """Numbers that a rank allocates, by layer. They are asked for again for every machine and micro-batch."""
    return _by_layer(model, lambda weight: prod(weight.local_shape(tp)) if weight.is_held(ep, 0) else 0)


@lru_cache(maxsize=MOST_KEPT)
def _numbers_of_rule(model: Architecture, tp: int, ep: int, rule: str, optimizer: OptimizerConfig) -> Sizes:
    """Numbers of the weights that a rule updates, by layer."""

    def measure(weight: Weight) -> int:
        is_mine = rule_of(weight, optimizer) == rule and weight.is_held(ep, 0)
        return prod(weight.local_shape(tp)) if is_mine else 0

    return _by_layer(model, measure, by_name=bool(optimizer.groups))


@lru_cache(maxsize=MOST_KEPT)
def _still(model: Architecture, tp: int, ep: int, optimizer: OptimizerConfig) -> Sizes:
    """Numbers that no step changes, by layer."""
    moving = {row.parameter for row in weight_table(model).values() if rule_of(row, optimizer) != FROZEN}

    def measure(weight: Weight) -> int:
        is_still = weight.parameter not in moving and weight.is_held(ep, 0)
        return prod(weight.local_shape(tp)) if is_still else 0

    return _by_layer(model, measure, by_name=True)


@lru_cache(maxsize=MOST_KEPT)
def _state_bytes(model: Architecture, tp: int, ep: int, optimizer: OptimizerConfig) -> Sizes:
    """Bytes of optimizer state, by layer."""

    def measure(weight: Weight) -> int:
        pieces = 1 if weight.cut is None else tp
        return state_bytes(weight, optimizer) // pieces if weight.is_held(ep, 0) else 0

    return _by_layer(model, measure, by_name=bool(optimizer.groups))


@lru_cache(maxsize=MOST_KEPT)
def _update_multiply_adds(model: Architecture, optimizer: OptimizerConfig) -> Sizes:
    """Of whole matrices, by layer."""

    def measure(weight: Weight) -> int:
        return int(rule_multiply_adds(weight, optimizer))

    return _by_layer(model, measure, by_name=bool(optimizer.groups))


@lru_cache(maxsize=MOST_KEPT)
def _largest_update(model: Architecture, optimizer: OptimizerConfig) -> float:
    """Of one matrix."""
    return max(rule_multiply_adds(weight, optimizer) for weight in weight_table(model).values())


def _by_layer(model: Architecture, measure: Callable[[Weight], int], *, by_name: bool = False) -> Sizes:
    """Sums by layer (`sum_by_layer`), with what a copy of the embedding at the head has."""
    table = weight_table(model, blocks=())["embedding.weight"]
    return {**sum_by_layer(model, measure, by_name=by_name), AT_HEAD: measure(table)}


def _by_stage(plan: RunPlan, sizes: Sizes) -> tuple[int, ...]:
    """Sums over what each pipeline stage holds."""
    stages = [sum(sizes[f"blocks.{index}"] for index in plan.blocks_of(stage)) for stage in range(plan.pp)]
    stages[plan.chunk_ranks[0]] += sizes["embedding"]
    behind = ("final_norm", "head", *(f"mtp.{depth}" for depth in range(plan.model.num_predictions)))
    stages[plan.chunk_ranks[-1]] += sum(sizes.get(layer, 0) for layer in behind)
    if has_embedding_copy(plan):
        stages[plan.chunk_ranks[-1]] += sizes[AT_HEAD]
    return tuple(stages)
