"""All families, which are the files of this folder that have a `FAMILY`, and which of them represents a model.

The first whose needs are all met does. Models that several could represent get the plainest, as their ranks say: Llama
before Mistral, whose class also takes heads that do not divide hidden_size, before Ministral.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megalite.architecture.architecture import Architecture
from megalite.checkpoint.hf import families
from megalite.checkpoint.hf.family import Family, traits
from megalite.errors import ConversionError
from megalite.plugins import Table
from megalite.section import Section


def _find_families() -> Iterator[Family]:
    """The `FAMILY` of every file of this folder."""
    for found in pkgutil.iter_modules(families.__path__, f"{families.__name__}."):
        if found.name == __name__:
            continue
        module = importlib.import_module(found.name)
        if hasattr(module, "FAMILY"):
            yield module.FAMILY


FAMILIES: Table[Family] = Table("model family", {family.model_type: family for family in _find_families()})
"""By model_type, the value in config.json."""


@dataclass(frozen=True)
class Exportable:
    """Whether a class of transformers represents a model; training does not need one, sharing the model does."""

    architecture: str | None
    """Its name; None when there is none."""
    why_not: str = ""
    condition: str = ""
    """What else an export depends on."""


def exportable(model: Architecture) -> Exportable:
    """As what a filled model can be exported."""
    try:
        family = choose_family(model)
        return Exportable(family.architecture, condition=family.condition)
    except ConversionError as error:
        return Exportable(None, str(error))


def choose_family(model: Architecture) -> Family:
    """The family that represents a filled model.

    Raises:
        ConversionError: there is none; names the nearest and what keeps it from fitting.
    """
    found = traits(model)
    ranked = sorted(FAMILIES.values(), key=lambda family: (family.rank, family.model_type))
    reasons = [_reasons(family, model, found) for family in ranked]
    nearest, why = min(zip(ranked, reasons, strict=True), key=lambda pair: len(pair[1]))  # the first of equal ones
    if not why:
        return nearest
    raise ConversionError(
        f"no class of transformers represents this model. The nearest is {nearest.architecture}, but {'; '.join(why)}"
    )


def _reasons(family: Family, model: Architecture, found: Mapping[str, Any]) -> list[str]:
    """What keeps a model with these traits from a family."""
    unmet = {trait: values for trait, values in family.all_needs.items() if found[trait] not in values}
    sentences = (
        f"model.{trait} is {_told(found[trait], trait, model)}, it needs "
        f"{' or '.join(_told(value, trait, model) for value in values)}"
        for trait, values in unmet.items()
    )
    return [*sentences, *family.refuses(model)]


def _told(value: Any, trait: str, model: Architecture) -> str:
    """A trait's value as a config has it: that of a section is whether there is one."""
    own = getattr(model, trait, value)
    if isinstance(value, bool) and (own is None or isinstance(own, Section)):
        return "set" if value else "null"
    return str(value)
