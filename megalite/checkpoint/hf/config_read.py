"""config.json of a Hugging Face folder as a model, or refused by name.

What only matters in training (dropout) is not read. Whatever changes the function and has no counterpart here is
refused, all of it at once: a model that is nearly the same would train, and be wrong. A key that nobody knows may do so
(`settings.py`), so it is refused too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megalite.architecture.architecture import Architecture
from megalite.checkpoint.hf.config_json import FILE_NAME
from megalite.checkpoint.hf.families.common import HARMLESS
from megalite.checkpoint.hf.families.registry import FAMILIES
from megalite.checkpoint.hf.family import Family
from megalite.checkpoint.hf.settings import Key, Settings
from megalite.config.checks_model import check_architecture
from megalite.config.fill import fill_model
from megalite.config.schema import BatchConfig
from megalite.config.sections.model import ModelConfig
from megalite.errors import ConversionError


@dataclass(frozen=True)
class Description:
    """What a config.json says."""

    family: Family
    model: Architecture
    """Filled."""


def read_config(folder: Path) -> Description:
    """Read config.json.

    Raises:
        ConversionError: it is missing or damaged, or of a model that megalite does not have.
    """
    path = folder / FILE_NAME
    raw = _load(path)
    found = raw.get("model_type")
    family = FAMILIES.get(found) if isinstance(found, str) else None
    if family is None:
        raise ConversionError(
            f"{path}: model_type is {found!r}, an architecture that megalite does not have; it reads "
            f"{', '.join(sorted(FAMILIES))}"
        )
    problems: list[str] = []
    fields = _read_fields(Settings(raw, problems), family)
    if problems:
        raise ConversionError("\n".join([f"{path}: not a model that megalite has:", *(f"  - {p}" for p in problems)]))
    try:
        given = ModelConfig(**fields)
        model = fill_model(given, BatchConfig())
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise ConversionError(f"{path}: settings that no model has: {wrong}") from error
    if wrong := "; ".join(check_architecture(given, model)):
        raise ConversionError(f"{path}: settings that no model has: {wrong}")
    return Description(family, model)


def _read_fields(settings: Settings, family: Family) -> dict[str, Any]:
    """The model's fields; what is wrong with them, and keys that nobody knows, become problems of the settings."""
    if "quantization_config" in settings:
        settings.complain("quantization_config", "quantized weights cannot be trained; take the unquantized folder")
    code = settings.take(Key("auto_map", dict, None, nullable=True)) or {}
    if foreign := [each for each in code.values() if str(each).rpartition("--")[2] not in family.published_code]:
        settings.complain("auto_map", f"the folder brings code of its own, {foreign[0]}, which megalite does not run")
    settings.expect("return_dict", True, True)
    same = {field: settings.take(key) for field, key in family.keys.items()}
    fields = {**same, **family.read(settings)}
    settings.ignore(HARMLESS | family.harmless | {"quantization_config"})
    settings.refuse_unknown()
    return {field: value for field, value in fields.items() if value is not None}


def _load(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConversionError(f"{path.parent}: no {path.name}, so this is not the folder of a Hugging Face model")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ConversionError(f"{path}: cannot be read ({error})") from error
    if not isinstance(raw, dict):
        raise ConversionError(f"{path}: found a {type(raw).__name__}, expected an object of settings")
    return raw
