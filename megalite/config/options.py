"""Options that a config gives to code of a plug-in, checked against what that code takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from megalite.config.explain import explain
from megalite.plugins import Addition
from megalite.section import Problem


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
