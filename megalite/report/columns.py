"""The numbers of metrics.jsonl as columns: one array a key, by rising step.

Neighbouring lines nearly always have the same keys, so a stretch of them becomes one array in one call. Eight bytes a
number: a million steps are some ten megabytes a key, in the process that has just trained.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np

from megalite.report.json_lines import Record

NAN = float("nan")

Stretch = tuple[tuple[str, ...], np.ndarray]
"""Keys, and the numbers of some lines, float64 [lines, keys]."""


def columns_of(stretches: Iterable[list[Record]]) -> dict[str, np.ndarray]:
    """Each key's numbers, NaN where a step has none; a step that was done again counts as the last attempt did it.

    `step`, `tokens` and `hours` are there always, unless there is no step at all.
    """
    found = [each for records in stretches for each in _stretches(records)]
    if not found:
        return {}
    steps, places = np.unique(np.concatenate([_column(each, "step") for each in found]), return_inverse=True)
    columns: dict[str, np.ndarray] = {}
    start = 0
    for keys, numbers in found:
        place = places[start : start + len(numbers)]
        start += len(numbers)
        for index, key in enumerate(keys):
            column = columns.setdefault(key, np.full(len(steps), NAN))
            column[place] = numbers[:, index]  # of equal places the last one stays
    columns = {key: column for key, column in columns.items() if key == "step" or not np.isnan(column).all()}
    columns["tokens"] = np.fmax.accumulate(np.nan_to_num(columns.get("tokens", steps)))
    columns["hours"] = np.cumsum(np.nan_to_num(columns.get("seconds", np.zeros(len(steps))))) / 3600
    return columns


def _stretches(records: list[Record]) -> Iterable[Stretch]:
    """Lines of equal keys together; those without a step are left out."""
    with_step = (record for record in records if type(record.get("step")) is int)
    for keys, group in itertools.groupby(with_step, key=tuple):
        yield keys, _numbers([record.values() for record in group]).reshape(-1, len(keys))


def _numbers(rows: list[Iterable[Any]]) -> np.ndarray:
    """All values one behind the other, NaN for those that are no numbers."""
    kinds = set(map(type, itertools.chain.from_iterable(rows)))
    if kinds <= {int, float, bool}:
        try:
            return np.fromiter(itertools.chain.from_iterable(rows), np.float64)
        except OverflowError:
            pass
    return np.fromiter((_number(value) for row in rows for value in row), np.float64)


def _number(value: Any) -> float:
    """NaN for what is no number, or larger than any."""
    try:
        return float(value) if isinstance(value, int | float) else NAN
    except OverflowError:
        return NAN


def _column(stretch: Stretch, key: str) -> np.ndarray:
    keys, numbers = stretch
    return numbers[:, keys.index(key)]
