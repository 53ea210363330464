"""The batch sizes of a run seen from outside: as configured, or as far as the run has chosen them itself."""

from __future__ import annotations

from megalite.checkpoint.catalog import latest
from megalite.checkpoint.format import read_manifest
from megalite.config.batch_sizes import BatchSizes, Span, batch_sizes
from megalite.config.schema import Config


def batch_sizes_of(config: Config) -> BatchSizes:
    """The size of every step. Where a run has let its batch grow, as its newest checkpoint says, the last going on."""
    newest = latest(config.run.dir)
    chosen = sizes_in(read_manifest(newest).progress.steering) if newest is not None else None
    return chosen or batch_sizes(config.batch)


def sizes_in(steering: dict) -> BatchSizes | None:
    """The batch sizes that a checkpoint's steering holds, if any."""
    spans = steering.get("batch_sizes")
    return None if spans is None else BatchSizes(tuple(Span(**span) for span in spans))
