"""The batch sizes of a run seen from outside: as configured, or as far as the run has chosen them itself."""

from __future__ import annotations

from typing import Any

from megalite.checkpoint.catalog import latest
from megalite.checkpoint.format import Progress, read_manifest
from megalite.config.batch_sizes import BatchSizes, Span, batch_sizes
from megalite.config.schema import Config

CONTROL = "adaptive_control"
"""Name of the component that chooses them."""


def batch_sizes_of(config: Config) -> BatchSizes:
    """The size of every step. Where a run has let its batch grow, as its newest checkpoint says, the last going on."""
    newest = latest(config.run.dir)
    chosen = sizes_at(read_manifest(newest).progress) if newest is not None else None
    return chosen or batch_sizes(config.batch)


def sizes_at(progress: Progress) -> BatchSizes | None:
    """The batch sizes that a run has chosen itself by some point, if any."""
    return sizes_in(progress.components.get(CONTROL, {}))


def sizes_in(state: dict[str, Any]) -> BatchSizes | None:
    """The same of the state of `components.adaptive_control`."""
    spans = state.get("batch_sizes")
    return None if spans is None else BatchSizes(tuple(Span(**span) for span in spans))
