"""The section `run`: where a run lives."""

from __future__ import annotations

from pathlib import Path

from pydantic import NonNegativeInt

from megalite.section import Section


class RunConfig(Section):
    """Where a run lives and what makes it reproducible."""

    dir: Path = Path("runs/default")
    """Run folder: config, metrics, events, checkpoints and the report go there. One folder is one run."""
    seed: NonNegativeInt = 1234
    """Seed of the weights, of the data order and of dropout."""
    deterministic: bool | None = None
    """Ask torch for deterministic kernels, so that a resumed run is bit-equal. null does so on CPUs, where it costs
    nothing. On a GPU it costs speed: attention's backward pass adds up in a fixed order, in more memory, compiled
    kernels are not tuned, and the few kernels that have no such form are refused."""
