"""What all sections of a config have in common."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

LARGEST_NUMBER = 2**63 - 1


class Section(BaseModel):
    """A group of settings: frozen, unknown keys refused, defaults validated, docstrings kept as descriptions."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

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


def _numbers(value: Any) -> Iterator[float]:
    """The finite numbers of a setting, also of a list."""
    for each in value if isinstance(value, list | tuple) else (value,):
        if isinstance(each, int | float) and each not in (math.inf, -math.inf):
            yield each
