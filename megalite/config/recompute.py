"""What each block makes again in its backward pass: `train.recompute`, and the rules of `train.recompute_layers`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megalite.architecture.architecture import Architecture
from megalite.config.plan import RunPlan
from megalite.config.schema import Config
from megalite.config.sections.train import RecomputeRule
from megalite.config.wording import or_
from megalite.errors import ConfigError


def recompute_by_block(config: Config, plan: RunPlan) -> tuple[str, ...]:
    """The mode of every block of the model, and behind them of those that predict further ahead."""
    return _modes(config, plan.model, [plan.blocks_of(stage) for stage in range(plan.pp)])


def recompute_of_whole(config: Config, model: Architecture) -> tuple[str, ...]:
    """The same of a model that one process has, which may be another than the config's.

    Raises:
        ConfigError: a rule is for blocks that it has not.
    """
    if problems := list(check_recompute(config, model)):
        raise ConfigError(problems)
    return _modes(config, model, [range(model.num_layers)])


def _modes(config: Config, model: Architecture, stages: Sequence[Sequence[int]]) -> tuple[str, ...]:
    modes = [str(config.train.recompute)] * (model.num_layers + model.num_predictions)
    for rule in config.train.recompute_layers:
        for index in _chosen(rule, model.num_layers, stages):
            modes[index] = rule.mode
    return tuple(modes)


def modes_of(config: Config) -> set[str]:
    """The modes that blocks may have."""
    return {config.train.recompute, *(rule.mode for rule in config.train.recompute_layers)}


def _chosen(rule: RecomputeRule, num_layers: int, stages: Sequence[Sequence[int]]) -> Sequence[int]:
    """The blocks that a rule is for.

    Args:
        stages: the blocks of each pipeline stage, in the model's order.
    """
    if rule.every is not None:
        return range(0, num_layers, rule.every)
    if rule.first is not None:
        return [index for blocks in stages for index in blocks[: rule.first]]
    return rule.blocks


def check_recompute(config: Config, model: Architecture) -> Iterator[str]:
    """Complaints about `train.recompute_layers`."""
    count, named = model.num_layers + model.num_predictions, "train.recompute_layers"
    modes: dict[int, str] = dict.fromkeys(range(count), config.train.recompute)
    for place, rule in enumerate(config.train.recompute_layers):
        name, ways = f"{named}.{place}", [key for key in ("blocks", "every", "first") if getattr(rule, key)]
        if len(ways) != 1:
            yield f"{name}: found {' and '.join(ways) or 'no blocks'}; give one of blocks, every and first"
            continue
        number = getattr(rule, ways[0])
        if beyond := [index for index in rule.blocks if index >= count]:
            yield (
                f"{name}.blocks: there is no block {or_(beyond)}; num_layers={model.num_layers} blocks count from 0"
                + (
                    f", and {model.num_predictions} that predict further behind them"
                    if count > model.num_layers
                    else ""
                )
            )
            continue
        if len(set(rule.blocks)) < len(rule.blocks):
            yield f"{name}.blocks: found {list(rule.blocks)}, which names a block twice; name each once"
        if ways[0] != "blocks" and number > model.num_layers:
            yield f"{name}.{ways[0]}: {number} is more than num_layers={model.num_layers}; use fewer"
            continue
        chosen = _chosen(rule, model.num_layers, [range(model.num_layers)])
        if all(modes[index] == rule.mode for index in chosen) and _is_sure(config, place):
            yield f"{name}.mode: these blocks have {rule.mode} without it; use another mode, or leave the rule out"
        modes.update(dict.fromkeys(chosen, rule.mode))


def _is_sure(config: Config, place: int) -> bool:
    """Whether a rule's blocks are known without the pipeline's stages, and those of the rules before it."""
    return config.parallel.pp == 1 or all(rule.first is None for rule in config.train.recompute_layers[: place + 1])
