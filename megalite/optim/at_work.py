"""What an update has beside weights, gradients and state while it works, and how much of it at a time. No torch.

    elementwise rules   a batch      results beside `AT_ONCE` numbers at most
    whole rules         a round      units of `ROUND_NUMBERS` an owner at most, on their way and at work (`exchange`)

In a round those are, one after the other: what travels, as it was made and in a row; that, and what comes; units that
have come, one at work, and those that are done; these, in a row; and as they come back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from megalite.addition import load
from megalite.config.optimizers import UpdateRule

AT_ONCE = 2**24
"""Numbers of which an update has results beside them."""

ROUND_NUMBERS = 2**25
"""Numbers that an owner has whole at once, or one unit that is larger; one unit, too, where it is alone."""

CHUNK = {"cpu": 2**16, "cuda": 2**22}
"""Numbers of work with large intermediate results: as many as stay in a core's cache, or fill a GPU."""

PACKED_ADAM, PACKED_LION = 33, 25
"""Bytes beside a number of a chunk with moments of 8 bits, counted in a profile."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Formats:
    """How a run's updates work: bytes of numbers, sizes, and how units lie."""

    product: int
    """Bytes of a number in the format in which rules multiply."""
    gradient: int
    """Bytes of a number of a gradient, as an update finds it."""
    chunk: int
    """Numbers of a chunk (`CHUNK`)."""
    longest_turned: int
    """Sides of a matrix that are no longer have a basis (SOAP)."""
    cuts_units: bool = False
    """Each is cut over ranks, not only those that are more than a rank has."""


def elementwise_bytes(rule: UpdateRule, numbers: int, *, is_coupled: bool) -> int:
    """Bytes of an elementwise rule at work, given so many numbers of a rank."""
    return 4 * (rule.results_beside + is_coupled) * min(numbers, AT_ONCE)


def whole_bytes(
    rule: UpdateRule, numbers: int, units: Sequence[Shape], sharers: int, formats: Formats, *, is_coupled: bool
) -> int:
    """Bytes of a rule at work that works on whole units.

    Args:
        numbers: that a rank updates by it.
        units: their shapes, each once.
        sharers: ranks that share them.
        is_coupled: decay is added to the gradients, which are then copies.
    """
    assert rule.work is not None
    of_rule, wire = load(rule.work), formats.product if rule.travels_as_products else 4
    most = max(map(prod, units))
    working = max(of_rule(unit, formats) for unit in units)
    made = wire if rule.makes_what_travels else 4 if is_coupled or formats.gradient != 4 else 0
    if sharers == 1:
        return made * most + working
    owned = min(max(numbers, most), max(ROUND_NUMBERS, most))
    mine = min(numbers, owned)
    assembled = wire * most if formats.cuts_units or most > numbers else 0
    return max(
        (made + wire) * mine,
        wire * (mine + owned),
        wire * owned + assembled + working,
        2 * wire * owned,
        wire * mine + (0 if wire == 4 else 4 * min(mine, AT_ONCE)),
    )


def orthogonal_work(unit: Shape, formats: Formats) -> int:
    """Muon's: the matrix before and after an iteration, its square and a polynomial of it."""
    return formats.product * 2 * (prod(unit) + min(unit) ** 2)


def packed_orthogonal_work(unit: Shape, formats: Formats) -> int:
    """muon8bit's: the same and the momentum, or at the end the result in fp32, too."""
    size, product = prod(unit), formats.product
    made = product * size + PACKED_LION * min(formats.chunk, size)
    return max(made, product * size + orthogonal_work(unit, formats), (2 * product + 4) * size)


def packed_work(unit: Shape, formats: Formats, per_number: int) -> int:
    """The direction, and a chunk's moments and codes."""
    return 4 * prod(unit) + per_number * min(formats.chunk, prod(unit))


def packed_adam_work(unit: Shape, formats: Formats) -> int:
    """adamw8bit's."""
    return packed_work(unit, formats, PACKED_ADAM)


def packed_lion_work(unit: Shape, formats: Formats) -> int:
    """lion8bit's."""
    return packed_work(unit, formats, PACKED_LION)


def plain_work(unit: Shape, formats: Formats) -> int:
    """Of a rule that nothing is known of: its direction, and as much again."""
    return 2 * 4 * prod(unit)


def factored_work(unit: Shape, formats: Formats) -> int:
    """Adafactor's: squares, and when they are gone the direction."""
    return 4 * prod(unit)


def soap_work(unit: Shape, formats: Formats) -> int:
    """SOAP's: both moments turned, the denominator and what is made of them; or beside the direction a side's basis,
    what is decomposed, and what that makes."""
    longest = max((side for side in unit if side <= formats.longest_turned), default=0)
    return max(16 * prod(unit), 4 * prod(unit) + 13 * longest**2)
