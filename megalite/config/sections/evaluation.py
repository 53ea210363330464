"""Parts of the section `train` that say how a run is judged: tasks, and when to stop for want of progress."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from megalite.section import Section


class SlopeConfig(Section):
    """A run ends when the loss falls too slowly: the slope of a line fitted to its last validations."""

    below: NonNegativeFloat
    """Nats: a fitted fall of less than this ends the run, and so does a rise."""
    per: Literal["1000-steps", "billion-tokens"] = "1000-steps"
    """What the fall is counted over."""
    window: Annotated[int, Field(ge=3)] = 8
    """Validations that the line is fitted to; nothing is decided before there are so many."""


class EarlyStoppingConfig(Section):
    """When a run ends before its last step: for want of progress, for slow progress, or because it is good enough."""

    patience: PositiveInt | None = 5
    """Validations in a row that may pass without progress; at the next one of them the run saves and ends. Null
    does not count them."""
    min_delta: NonNegativeFloat = 0.0
    """What the loss must fall by, below its lowest so far, to count as progress for `patience`."""
    slope: SlopeConfig | None = None
    """End when the loss falls too slowly; null does not."""
    target: PositiveFloat | None = None
    """End when the loss is at or below this; null does not."""
    set: str | None = None
    """Name of the validation set whose loss decides; null takes what `train.watch` says, a set or the mean of all."""


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
