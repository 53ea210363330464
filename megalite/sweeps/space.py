"""What a sweep tries: keys of the config, each with a list of values or with a range.

space:
  optimizer.lr: {low: 1e-4, high: 1e-2, log: true, points: 5}     a range; a grid takes its points
  optimizer.weight_decay: [0.0, 0.1]                               a list
  width:                                                           keys that change together: a name without a dot
    - {model.hidden_size: 64, model.num_heads: 2}
    - {model.hidden_size: 128, model.num_heads: 4}
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megalite.errors import did_you_mean

MAX_GRID = 10_000
"""Points of a grid: more is a mistake, or a matter for random search."""

RANGE_KEYS = ("low", "high", "log", "step", "points")

DIGITS, MOST_DIGITS = 4, 17
"""Of a number drawn from a range, and those that no number has more of."""

SHOWN_DIGITS = 10
"""At most, of a number in a table: points of a narrow range differ in their last ones."""

Point = dict[str, Any]
"""A value for each dimension, by its name."""


@dataclass(frozen=True)
class ValueRange:
    """A range of numbers, both ends included; whole ones where both ends are, and the step."""

    low: float
    high: float
    log: bool = False
    step: float | None = None
    points: int | None = None

    @property
    def is_whole(self) -> bool:
        """Only whole numbers are drawn."""
        ends_and_step = (self.low, self.high, 1 if self.step is None else self.step)
        return all(isinstance(each, int) for each in ends_and_step)

    @property
    def num_points(self) -> int | None:
        """Of a grid, at most; None where neither points nor steps are given."""
        if self.points is not None or self.step is None:
            return self.points
        return math.floor((self.high - self.low) / self.step + 1e-9) + 1

    def grid(self) -> tuple[float, ...]:
        """Its points, evenly spaced (by their logarithms with `log`), or all of its steps."""
        if self.points is None:
            step, count = self.step, self.num_points
            assert step is not None, "checked"
            assert count is not None, "follows from the step"
            return self._told_apart([self.low + number * step for number in range(count)])
        shares = [number / max(1, self.points - 1) for number in range(self.points)]
        if self.log:
            found = [self.low * (self.high / self.low) ** share for share in shares]
        else:
            found = [self.low + (self.high - self.low) * share for share in shares]
        return self._told_apart(found)

    def _told_apart(self, values: Sequence[float]) -> tuple[float, ...]:
        """Values as they are tried: whole ones once each, others with more digits where four would move them by more
        than a hundredth of the way to their neighbours."""
        if self.is_whole:
            return tuple(dict.fromkeys(map(self.rounded, values)))
        most = min((after - before for before, after in itertools.pairwise(values)), default=math.inf) / 100
        for digits in range(DIGITS, MOST_DIGITS):
            found = tuple(self.rounded(each, digits) for each in values)
            if all(abs(near - value) <= most for near, value in zip(found, values, strict=True)):
                return found
        return tuple(dict.fromkeys(values))

    @property
    def _digits(self) -> int:
        """Of a number drawn from it: more where its ends share their first ones."""
        shared = math.log10(max(abs(self.low), abs(self.high)) / (self.high - self.low))
        return min(MOST_DIGITS, DIGITS + max(0, math.floor(shared)))

    def rounded(self, value: float, digits: int | None = None) -> float:
        """A value as it is tried: whole, or with so many digits, and within the ends."""
        near = round(value) if self.is_whole else float(f"{value:.{digits or self._digits}g}")
        return min(max(near, self.low), self.high)


@dataclass(frozen=True)
class Dimension:
    """One thing that is varied."""

    name: str
    choices: tuple[Any, ...] = ()
    span: ValueRange | None = None
    """In place of choices."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Of the config, that it changes."""
        return tuple(self.choices[0]) if is_group(self.name) else (self.name,)

    def grid(self) -> tuple[Any, ...]:
        """All values that a grid takes."""
        return self.choices if self.span is None else self.span.grid()

    def probes(self) -> tuple[Any, ...]:
        """Values that are checked where those to come are not known: all of a list, the ends of a range."""
        return self.choices if self.span is None else (self.span.low, self.span.high)


def overrides_of(point: Mapping[str, Any]) -> tuple[str, ...]:
    """`section.key=value` for each key of a point; a group of keys gives several."""
    pairs: list[tuple[str, Any]] = []
    for name, value in point.items():
        pairs += value.items() if is_group(name) else [(name, value)]
    return tuple(
        f"{key}={value if isinstance(value, float) else json.dumps(value, ensure_ascii=False)}" for key, value in pairs
    )


def in_words(point: Mapping[str, Any]) -> str:
    """A point in a line; of a group its first key alone."""
    pairs = [next(iter(value.items())) if is_group(name) else (name, value) for name, value in point.items()]
    return " ".join(f"{key}={_shown(value)}" for key, value in pairs)


def label_of(value: Any) -> str:
    """A value in a cell; of a group its first value."""
    if isinstance(value, Mapping):
        return label_of(next(iter(value.values())))
    return _shown(value)


def _shown(value: Any) -> str:
    return f"{value:.{SHOWN_DIGITS}g}" if isinstance(value, float) else str(value)


def is_group(name: str) -> bool:
    """Keys of a config have a dot, groups of them have none."""
    return "." not in name


def grid(dimensions: Sequence[Dimension]) -> list[Point]:
    """Every combination, the last dimension changing fastest."""
    names = [each.name for each in dimensions]
    return [
        dict(zip(names, values, strict=True)) for values in itertools.product(*(each.grid() for each in dimensions))
    ]


def grid_size(dimensions: Sequence[Dimension]) -> int:
    """How many combinations there are."""
    return math.prod(len(each.grid()) for each in dimensions)


def corners(dimensions: Sequence[Dimension]) -> list[Point]:
    """Points that show whether a space is sound: the first value of all, and each other value beside those."""
    first = {each.name: each.probes()[0] for each in dimensions}
    others = [{**first, each.name: value} for each in dimensions for value in each.probes()[1:]]
    return [first, *others]


def read_dimension(name: str, given: Any) -> tuple[Dimension | None, list[str]]:
    """A dimension of a sweep file, or what is wrong with it."""
    if isinstance(given, list | tuple):
        found = list(_wrong_list(name, given))
        return (None, found) if found else (Dimension(name, choices=tuple(given)), [])
    if not isinstance(given, Mapping):
        hint = "a list of values, or a range such as {low: 1e-4, high: 1e-2, log: true}"
        return None, [f"found {given!r}, expected {hint}"]
    found = list(_wrong_range(name, given))
    return (None, found) if found else (Dimension(name, span=ValueRange(**given)), [])


def _wrong_list(name: str, given: Sequence[Any]) -> Iterator[str]:
    if not given:
        yield "an empty list; give at least one value"
    seen: list[Any] = []
    for each in given:
        if any(each == other and isinstance(each, bool) == isinstance(other, bool) for other in seen):
            yield f"{each!r} is there twice; remove one"
        seen.append(each)
        if is_group(name) != isinstance(each, Mapping):
            told = "a name without a dot is a group of keys, whose values are mappings: {model.hidden_size: 64, ...}"
            yield f"found {each!r}; {told}" if is_group(name) else f"found {each!r}, expected a value of {name}"
    if is_group(name) and all(isinstance(each, Mapping) for each in given):
        if len({tuple(sorted(each)) for each in given}) > 1:
            yield "its values name different keys; each must name all of them"
        if any(not each for each in given):
            yield "a mapping without keys; name those that change together"


def _wrong_range(name: str, given: Mapping[str, Any]) -> Iterator[str]:
    for key in given:
        if key not in RANGE_KEYS:
            yield f"{key}: no key of a range{did_you_mean(str(key), RANGE_KEYS)}; use {', '.join(RANGE_KEYS)}"
    for key in ("low", "high"):
        if not _is_number(given.get(key)):
            yield f"{key}: found {given.get(key)!r}, expected a finite number"
    if is_group(name):
        yield "a name without a dot is a group of keys, which has a list of mappings and no range"
    if not isinstance(given.get("log", False), bool):
        yield f"log: found {given['log']!r}, expected true or false"
    points, step = given.get("points"), given.get("step")
    if points is not None and (type(points) is not int or points < 1):
        yield f"points: found {points!r}, expected a whole number of at least 1"
    if step is not None and (not _is_number(step) or step <= 0):
        yield f"step: found {step!r}, expected a number above 0"
    if step is not None and (points is not None or given.get("log") is True):
        yield "step: found beside points or log; give one of them"
    if all(_is_number(given.get(key)) for key in ("low", "high")):
        low, high = given["low"], given["high"]
        if low >= high:
            yield f"an empty range: low={low:g} is not below high={high:g}"
        elif given.get("log") is True and low <= 0:
            yield f"low: {low:g}, but log=true needs numbers above 0"
        elif type(low) is type(high) is int and type(points) is int and points > high - low + 1:
            yield f"points: {points}, of {high - low + 1} whole numbers; write low: {low}.0 for what is between them"


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and abs(value) < 2**63
