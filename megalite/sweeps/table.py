"""The trials of a sweep in the order in which a reader wants them."""

from __future__ import annotations

from megalite.sweeps.record import SweepBook, TrialRecord
from megalite.sweeps.settings import SweepConfig

ORDER = ("done", "pruned", "stopped", "waiting", "diverged", "failed")


def in_order(settings: SweepConfig, book: SweepBook) -> list[TrialRecord]:
    """The best first; then those that halving ended, the furthest first; then what has no value."""
    sign = 1.0 if settings.goal == "min" else -1.0

    def place(record: TrialRecord) -> tuple[int, int, float, int]:
        value = sign * record.value if record.value is not None else 0.0
        return ORDER.index(record.state), -record.steps if record.state == "pruned" else 0, value, record.number

    return sorted(book.trials.values(), key=place)
