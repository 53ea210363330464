"""Saving a checkpoint and waiting for it, in one call: for tools and tests. Training holds a `background.Saver`."""

from __future__ import annotations

from pathlib import Path

import torch

from megalite.checkpoint.background import Saver
from megalite.checkpoint.format import Progress
from megalite.checkpoint.saving import Target
from megalite.config.plan import RunPlan
from megalite.engine.protocol import Engine
from megalite.parallel.axes import Axes


def save(
    root: Path,
    engine: Engine,
    axes: Axes,
    *,
    plan: RunPlan,
    progress: Progress,
    config_text: str,
    data: dict,
    device: torch.device,
) -> Path:
    """Write the checkpoint of the current step and wait for it. Collective.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: on all ranks, when any could not write; nothing is left behind.
    """
    saver = Saver(Target(root, plan, config_text, data), engine, axes, device, asynchronous=False)
    saver.start(progress)
    outcome = saver.finish()
    assert outcome is not None, "a save has just begun"
    if outcome.error is not None:
        raise outcome.error
    return outcome.folder
