"""What all sections of a config have in common."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

LARGEST_NUMBER = 2**63 - 1

Problem = tuple[tuple[str, ...], str]
"""The keys that lead to a setting, and a sentence about it."""


class Section(BaseModel):
    """A group of settings: frozen, unknown keys refused, defaults validated, docstrings kept as descriptions."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    def problems(self) -> Iterator[Problem]:
        """What is wrong with values that are right by themselves; asked when all sections are there."""
        return iter(())

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_odd_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """`tp: true` would quietly become 1, and arithmetic with 1e300 would end in an overflow."""
        assert info.field_name is not None, "a validator of fields"
        annotation = cls.model_fields[info.field_name].annotation
        if isinstance(value, bool) and bool not in (annotation, *get_args(annotation)):
            raise PydanticCustomError("bool_as_number", "true and false are not numbers")
        if any(abs(number) > LARGEST_NUMBER for number in _numbers(value)):
            raise PydanticCustomError("too_large", "no setting means anything beyond 2^63")
        return value


class FrozenOptions(dict[str, Any]):
    """What code of a plug-in is to be told; it has a hash, as sections have, and is never changed."""

    def __hash__(self) -> int:  # type: ignore[override]  # a dict has none, since it may change
        return hash(json.dumps(self, sort_keys=True, default=str))


Options = Annotated[dict[str, Any], AfterValidator(FrozenOptions)]
"""The type of a setting that holds them."""


def problems_of(section: Section, keys: tuple[str, ...] = ()) -> Iterator[Problem]:
    """What sections find wrong with themselves, all the way down."""
    yield from ((keys + inner, sentence) for inner, sentence in section.problems())
    for name in type(section).model_fields:
        value = getattr(section, name)
        for place, each in enumerate(value) if isinstance(value, tuple) else [(None, value)]:
            if isinstance(each, Section):
                yield from problems_of(each, (*keys, name) if place is None else (*keys, name, str(place)))


def _numbers(value: Any) -> Iterator[float]:
    """The finite numbers of a setting, also of a list."""
    for each in value if isinstance(value, list | tuple) else (value,):
        if isinstance(each, int | float) and each not in (math.inf, -math.inf):
            yield each
