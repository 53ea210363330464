"""What plug-ins bring to training: the names of losses, metrics and components, and whether the options that a config
gives to their code are what that code takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from megalite.addition import Addition
from megalite.config.explain import explain
from megalite.plugins import Table
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


def wrong_options(
    code: object, given: Mapping[str, Any], who: str, keys: tuple[str, ...] = ("options",)
) -> Iterator[Problem]:
    """Complain about options that code does not take, or takes otherwise.

    Args:
        code: an `Addition`; anything else is ours, and takes none.
        who: what the code is, for people.
        keys: where the options stand.
    """
    if not isinstance(code, Addition):
        if given:
            yield keys, f"found {', '.join(given)}, but {who} is no plug-in's, and takes no options; leave them out"
        return
    try:
        code.options.model_validate(dict(given))
    except ValidationError as error:
        yield from ((keys + inner, sentence) for inner, sentence in explain(error, code.options))
