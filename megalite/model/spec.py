"""What a stage is built from."""

from __future__ import annotations

from dataclasses import dataclass, field

from megalite.architecture.architecture import Architecture
from megalite.layers.parts import Parts
from megalite.parallel.axes import SINGLE, Axis


@dataclass(frozen=True)
class StageSpec:
    """Everything a stage is built from."""

    model: Architecture
    """Filled by `config.plan.fill_model`."""
    blocks: tuple[int, int]
    """Half-open range of blocks."""
    is_first: bool = True
    is_last: bool = True
    tp: Axis = SINGLE
    sequence_parallel: bool = False
    recompute: str = "none"
    parts: Parts = field(default_factory=Parts)
    seed: int = 0
    """Seeds dropout, and the initial weights where no other source of them is given."""
