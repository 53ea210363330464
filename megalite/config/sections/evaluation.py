"""Parts of the section `train` that say how a run is judged: tasks, and when to stop for want of progress."""

from __future__ import annotations

from pathlib import Path

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from megalite.section import Section


class EarlyStoppingConfig(Section):
    """When a run ends before its last step."""

    patience: PositiveInt = 5
    """Validations in a row that may pass without progress; at the next one of them the run saves and ends."""
    min_delta: NonNegativeFloat = 0.0
    """What the loss must fall by, below its lowest so far, to count as progress."""


class TaskConfig(Section):
    """Multiple-choice questions that the run answers at every validation."""

    path: Path
    """A jsonl file: an object a line with `context`, `choices` and `label`, see docs/evaluate.md."""
    name: str | None = None
    """Name in metrics and messages; null takes the file's."""
    limit: PositiveInt | None = None
    """Questions that are asked, from the first; null for all."""
    alarm_drop: PositiveFloat | None = None
    """Accuracy below its best so far by more than this is an alarm in events.jsonl: 0.05 is five questions of a
    hundred. Null for none."""
