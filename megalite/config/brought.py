"""What only plug-ins bring to training: losses, metrics and components, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megalite.config.options import wrong_options
from megalite.plugins import Addition, Table
from megalite.section import Problem

LOSSES: Table[Addition] = Table("loss", {})
"""`(logits, labels)` to the loss of each token."""

METRICS: Table[Addition] = Table("metric", {})
"""`(step, result, context)` to a number."""

COMPONENTS: Table[Addition] = Table("component", {})
"""`(context)` to a `train.components.component.Component`."""


def wrong_choices(table: Table[Addition], chosen: Mapping[str, Any], key: str) -> Iterator[Problem]:
    """Complain about names that a table does not have, and about options that do not fit.

    Args:
        chosen: options by name; None is none.
        key: where they stand.
    """
    for name, options in chosen.items():
        if name not in table:
            yield (key, name), table.unknown(name)
        elif not isinstance(options, Mapping | None):
            yield (key, name), f"found {options!r}, expected a group of options (lines of `key: value`), or nothing"
        else:
            yield from wrong_options(table[name], options or {}, f"{table.kind} {name}", (key, name))
