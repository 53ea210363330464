"""Rules that plug-ins bring: a function gives each text a number, and the recipe says which numbers stay.

    clean: {custom: {emoji_share: {max: 0.05, options: {...}}}}

Numbers travel as the bits of float64 in columns of their own behind the int64 statistics, so that such a rule is a
rule like the others: it names its reason, and `megalite data effects` draws it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megalite.corpus.rules.columns import NUM_COLUMNS
from megalite.corpus.rules.rule import Rule
from megalite.corpus.rules.settings import FILTER_RULES, CustomRuleConfig
from megalite.errors import DataError
from megalite.texts import Texts

SHOWN_CHARS = 60
"""Of a text at which a rule has failed."""


@dataclass(frozen=True)
class BroughtRule(Rule):
    """A threshold on a number that a plug-in gives."""

    def values(self, statistics: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(statistics[:, self.column]).view(np.float64)


def brought_rules(custom: Mapping[str, CustomRuleConfig]) -> list[Rule]:
    """The rules, up to two for each number."""
    rules: list[Rule] = []
    for column, (name, config) in enumerate(custom.items(), start=NUM_COLUMNS):
        if config.min is not None:
            rules.append(BroughtRule(f"{name} too low", column, config.min, ">="))
        if config.max is not None:
            rules.append(BroughtRule(f"{name} too high", column, config.max, "<="))
    return rules


def with_brought(statistics: np.ndarray, texts: Texts, custom: Mapping[str, CustomRuleConfig]) -> np.ndarray:
    """The statistics with a column more for each number.

    Args:
        statistics: int64 [documents, columns].

    Raises:
        DataError: a plug-in's function fails, or gives no number.
    """
    if not custom:
        return statistics
    spelled = list(texts)
    columns = [_numbers(name, config, spelled).view(np.int64) for name, config in custom.items()]
    return np.column_stack([statistics, *columns])


def _numbers(name: str, config: CustomRuleConfig, texts: list[str]) -> np.ndarray:
    measure = FILTER_RULES[name].bound(config.options)
    values = np.empty(len(texts), np.float64)
    for index, text in enumerate(texts):
        try:
            values[index] = float(measure(text))
        except Exception as error:
            raise DataError(
                f"clean.custom.{name}: the plug-in's rule failed at a text that begins {text[:SHOWN_CHARS]!r}: "
                f"{type(error).__name__}: {error}"
            ) from error
        if np.isnan(values[index]):
            raise DataError(f"clean.custom.{name}: the plug-in's rule gives NaN for {text[:SHOWN_CHARS]!r}")
    return values
