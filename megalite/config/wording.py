"""Words that complaints about settings are made of: what has no effect, the nearest legal values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megalite.section import Section


def unused(section: Section, keys: Iterable[str], name: str, because: str) -> Iterator[str]:
    """Complain about each key that is not at its default."""
    for key in keys:
        value, default = getattr(section, key), type(section).model_fields[key].default
        if value != default:
            found = "a group" if isinstance(value, Section) else _shown(value)
            advice = "leave it out" if isinstance(default, Section) else f"leave it at {default}"
            if default is None:
                advice = "leave it at null"
            yield f"{name}.{key}: found {found}, but it has no effect with {because}; {advice}"


def _shown(value: object) -> object:
    """A value as a complaint has it: of a list of sections, how many there are."""
    is_list = isinstance(value, tuple) and value and isinstance(value[0], Section)
    return f"{len(value)} of them" if is_list and isinstance(value, tuple) else value


def near(value: int, step: int) -> list[int]:
    """The multiples of `step` next to a value, below and above."""
    below = value // step * step
    return [multiple for multiple in (below, below + step) if multiple]


LARGEST_DIVISOR = 4096
"""Beyond which none is looked for: as a number of ranks or heads they would help nobody."""


def divisors(number: int) -> list[int]:
    """Those up to `LARGEST_DIVISOR`, from 1 up."""
    return [divisor for divisor in range(1, min(number, LARGEST_DIVISOR) + 1) if number % divisor == 0]


def or_(values: Iterable[object]) -> str:
    """`1, 2 or 3`."""
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}" if most else last


def counted(number: int, noun: str = "micro-batch", many: str = "micro-batches") -> str:
    """`1 micro-batch`, `2 micro-batches`."""
    return f"{number:,} {noun if number == 1 else many}"
