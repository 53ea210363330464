"""Which of `optimizer.groups` a weight belongs to: the first that has a pattern of its name. No torch."""

from __future__ import annotations

from fnmatch import fnmatchcase

from megalite.config.sections.optimizer import OptimizerConfig, WeightGroupConfig


def group_of(name: str, optimizer: OptimizerConfig) -> WeightGroupConfig | None:
    """The group of a weight by its canonical name; None for what no group has."""
    number = group_number(name, optimizer)
    return None if number is None else optimizer.groups[number]


def is_trained(name: str, optimizer: OptimizerConfig) -> bool:
    """Whether a weight is not frozen."""
    group = group_of(name, optimizer)
    return group is None or not group.frozen


def group_number(name: str, optimizer: OptimizerConfig) -> int | None:
    """The same by its place in the list."""
    matching = (number for number, group in enumerate(optimizer.groups) if does_match(name, group))
    return next(matching, None)


def does_match(name: str, group: WeightGroupConfig) -> bool:
    """Whether a group has a pattern of a name, and none that takes it out."""
    is_in, is_out = (any(fnmatchcase(name, pattern) for pattern in patterns) for patterns in (group.match, group.but))
    return is_in and not is_out
