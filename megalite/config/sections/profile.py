"""Part of the section `monitor`: steps that a profiler traces."""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveInt, field_validator

from megalite.config.step_range import parse_step_range
from megalite.section import Section


class ProfileConfig(Section):
    """Steps of which every rank writes a trace into RUN/profile, for `megalite profile RUN`, Perfetto and
    chrome://tracing; the run computes the same numbers."""

    steps: str
    """`A:B`, the steps A to B - 1, counted from 1 as in metrics.jsonl. Steps that settle (the first five or so)
    say little."""
    ranks: tuple[NonNegativeInt, ...] | None = None
    """Ranks that are traced; null for all."""
    memory: bool = False
    """Trace what is allocated and freed too; on GPUs also a snapshot for pytorch.org/memory_viz, of which stack has
    allocated what."""
    shapes: bool = False
    """Keep the shapes of every op's inputs."""
    stacks: bool = False
    """Keep the Python stack of every op: traces become several times as large, and steps as slow."""
    most: PositiveInt = 64
    """Traced steps, times traced ranks, that are allowed: a trace has some megabytes a step, and is held in memory
    until it is written. Raise it when you have seen how large yours are."""

    @field_validator("steps")
    @classmethod
    def _are_steps(cls, value: str) -> str:
        parse_step_range(value)
        return value

    @property
    def step_range(self) -> range:
        """The steps."""
        return parse_step_range(self.steps)
