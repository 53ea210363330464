"""Numbers as people read them."""

from __future__ import annotations

UNITS = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3))

SCALES = (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3))


def count(number: int) -> str:
    """1234567 as 1,234,567."""
    return f"{number:,}"


def short(number: int) -> str:
    """1234567 as 1.23 M; up to five digits as they are."""
    if number < 100_000:
        return count(number)
    name, scale = next((name, scale) for name, scale in SCALES if number >= scale)
    return f"{number / scale:.3g} {name}" if number < 999.5 * scale else f"{number / scale:,.0f} {name}"


def size(num_bytes: int | None) -> str:
    """Bytes in powers of a thousand; a dash for what is not known."""
    if num_bytes is None:
        return "–"
    for name, scale in UNITS:
        if num_bytes >= scale:
            return f"{num_bytes / scale:,.1f} {name}"
    return f"{num_bytes} bytes"


def share(part: int, whole: int) -> str:
    """A part in percent; small ones are not rounded away, nor is what is missing to the whole."""
    if not whole:
        return "–"
    percent = 100 * part / whole
    if 0 < percent < 0.1:
        return "under 0.1 %"
    return "over 99.9 %" if 99.95 <= percent < 100 else f"{percent:.1f} %"
