"""All families, and which of them represents a model.

The first whose needs are all met does. Models that several could represent get the plainest: Llama before Mistral,
whose class also takes heads that do not divide hidden_size.
"""

from __future__ import annotations

from dataclasses import dataclass

from megalite.checkpoint.hf.families import gpt2, gpt_neox, llama, mistral, qwen2, qwen3
from megalite.checkpoint.hf.family import Family, traits
from megalite.config.schema import ModelConfig
from megalite.errors import ConversionError

FAMILIES: tuple[Family, ...] = tuple(each.FAMILY for each in (llama, mistral, qwen2, qwen3, gpt_neox, gpt2))
BY_MODEL_TYPE = {family.model_type: family for family in FAMILIES}


@dataclass(frozen=True)
class Exportable:
    """Whether a class of transformers represents a model; training does not need one, sharing the model does."""

    architecture: str | None
    """Its name; None when there is none."""
    why_not: str = ""
    condition: str = ""
    """What else an export depends on."""


def exportable(model: ModelConfig) -> Exportable:
    """As what a filled model can be exported."""
    try:
        family = choose_family(model)
        return Exportable(family.architecture, condition=family.condition)
    except ConversionError as error:
        return Exportable(None, str(error))


def choose_family(model: ModelConfig) -> Family:
    """The family that represents a filled model.

    Raises:
        ConversionError: there is none; names the nearest and what keeps it from fitting.
    """
    found = traits(model)
    unmet = [
        {trait: values for trait, values in family.needs.items() if found[trait] not in values} for family in FAMILIES
    ]
    nearest = min(range(len(FAMILIES)), key=lambda index: len(unmet[index]))
    if not unmet[nearest]:
        return FAMILIES[nearest]
    reasons = "; ".join(
        f"model.{trait} is {found[trait]}, it needs {' or '.join(map(str, values))}"
        for trait, values in unmet[nearest].items()
    )
    name = FAMILIES[nearest].architecture
    raise ConversionError(f"no class of transformers represents this model. The nearest is {name}, but {reasons}")
