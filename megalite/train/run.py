"""What a rank trains with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from megalite.checkpoint.fence import Fence
from megalite.config.plan import RunPlan
from megalite.config.schema import Config
from megalite.data.samples import Samples
from megalite.engine.protocol import Engine
from megalite.monitor.recorder import Recorder
from megalite.parallel.axes import Axes
from megalite.train.evaluation.tasks import Task
from megalite.train.heartbeat import Heartbeat
from megalite.train.preflight import ReadyStage
from megalite.train.signals import StopRequest


@dataclass(frozen=True)
class Run:
    """What a rank trains with; only the loop and what assembles it see all of it."""

    config: Config
    """Of the stage that it is in."""
    whole: Config
    """Of all its stages."""
    stages: tuple[ReadyStage, ...]
    """All of them, in their order; one for a run of one length."""
    plan: RunPlan
    axes: Axes
    device: torch.device
    engine: Engine
    samples: Samples
    """Of the training mixture, as the stage began; after a rollback the loop has others."""
    valid_sets: dict[str, Samples]
    tasks: list[Task]
    recorder: Recorder
    fence: Fence
    stop: StopRequest
    heartbeat: Heartbeat
    former_data: Mapping[str, Any] = field(default_factory=dict)
    """What the checkpoint that the run goes on from has recorded of its data; empty for a new run."""
