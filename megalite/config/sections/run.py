"""The section `run`: where a run lives."""

from __future__ import annotations

from pathlib import Path

from pydantic import NonNegativeInt

from megalite.config.section import Section


class RunConfig(Section):
    """Where a run lives and what makes it reproducible."""

    dir: Path = Path("runs/default")
    """Run folder: config, metrics, events, checkpoints and the report go there. One folder is one run."""
    seed: NonNegativeInt = 1234
    """Seed of the weights, of the data order and of dropout."""
    deterministic: bool = True
    """Ask torch for deterministic kernels, so that a resumed run is bit-equal. Turn off when a GPU kernel has no
    deterministic form or to gain a little speed."""
