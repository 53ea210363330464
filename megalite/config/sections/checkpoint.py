"""The section `checkpoint`: when to save, how, and what to keep."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from megalite.section import Section


class CheckpointConfig(Section):
    """When to save, how, and what to keep."""

    every: PositiveInt | None = None
    """Steps between checkpoints (there is always one at the end); null for only that one."""
    keep_last: PositiveInt = 2
    """The newest ones that are kept; damaged ones do not count."""
    keep_every: PositiveInt | None = None
    """Checkpoints whose step is a multiple of this are kept for ever; null for none."""
    keep_best: PositiveInt | None = None
    """How many with the lowest validation loss are kept besides; only steps that are validated too take part. Null for
    none."""
    asynchronous: bool = True
    """Write behind the training, which stops only to copy this rank's share into host memory: 12 bytes for each
    parameter of its share. Turn off where that memory is not there."""
    if_busy: Literal["wait", "skip"] = "wait"
    """What to do when a checkpoint is due and the last one is still being written: wait for it, or leave this one out.
    The last one of a run is never left out."""
    max_failures: PositiveInt = 3
    """Saves in a row that may fail, each noted in events.jsonl and tried again when the next is due, before the run
    ends with an error. The last save of a run has one try."""
    timeout_seconds: PositiveFloat = 1800.0
    """How long the first rank waits for the others' shares once its own is written."""
    differential: bool = False
    """Store only what changed since the checkpoint before; the rest is linked. Pays where much stands still (frozen
    weights), and costs a hash of every number where little does."""
    compress: bool = False
    """Pack the numbers without loss: a smaller checkpoint for more work, and no longer plain safetensors files."""
