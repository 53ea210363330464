"""What a part of the training loop may do, and what it is told.

    before_step -> [the engine trains] -> measure -> after_step
    before_save, where a checkpoint follows               finish, at the end
    state -> checkpoint -> load_state                     rewind, where the run goes back to an earlier step

A component is the same on all ranks and is called on all of them at the same points, so its methods may be collective.
What ours ask for follows from numbers that all ranks share; a plug-in's wish to go back counts if one rank has it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from megalite.config.plan import RunPlan
from megalite.config.schema import Config
from megalite.data.loader import Batch
from megalite.data.samples import Samples
from megalite.engine.protocol import Engine, StepResult
from megalite.loop_checks import check_wish
from megalite.monitor.recorder import Recorder
from megalite.parallel.axes import Axes


@dataclass
class Step:
    """A step as components see it; what stands under `lr` may be set before it."""

    number: int
    """From 1."""
    batches: list[Batch]
    """This rank's micro-batches, on its device."""
    samples: range
    """The run's samples that all ranks read."""
    data: Samples
    num_tokens: int
    """Of the global batch, padding included."""
    num_tokens_total: int
    """That the run has read, this step included."""
    lr: float = 0.0
    """The run's; groups with a schedule of their own follow, by the factor that it is changed by."""
    clip_norm: float | None = None
    """The largest gradient norm; None for no clipping."""
    set_by: str = ""
    """The component that has set rate or clipping last."""
    seconds: float = 0.0
    """Wall time, waiting for data included; known after the step."""
    figures: dict[str, float] = field(default_factory=dict)
    """More numbers for this step's line of metrics.jsonl, by name: each is added once, at `measure` at the latest."""


@dataclass(frozen=True)
class RollBack:
    """A component asks to go back to an earlier checkpoint."""

    before: int
    """The first step that is not to be trusted."""
    why: str
    skip_samples: int | None = None
    """Leave out the data that was read since then, and so many samples more; None reads the same data again."""

    def __post_init__(self) -> None:
        check_wish(self.before, self.why, self.skip_samples)


class Component:
    """A part of the loop; what a class does not define does nothing."""

    name = ""
    """By which checkpoints keep its state, and errors name it; no two of a run have the same."""
    is_brought = False
    """Whether a plug-in brings it, so that its ranks may not be of one mind."""

    def before_step(self, step: Step) -> None:
        """The step's batches are on the device; rate and clipping can still be set."""

    def measure(self, step: Step, result: StepResult) -> None:
        """The weights are updated, or the step was left out, as `result` says; numbers for this step's line of
        metrics.jsonl can still go into `step.figures`."""

    def after_step(self, step: Step, result: StepResult) -> RollBack | None:
        """All have measured. Who asks to go back ends the step; one rank's wish is enough, and of several the first
        rank's counts."""

    def before_save(self, step: int) -> RollBack | None:
        """A checkpoint of a step is about to be made, or the run goes back, as after a step."""

    def stop_reason(self) -> str:
        """Why the run should end after the step, for good; empty to go on. One rank's is enough."""
        return ""

    def finish(self, step: int) -> None:
        """The run has come to its end, which may be an early one; not called when it only stops for a while. The last
        save follows, also when this fails; then it is not called again."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold to go on from, ready for JSON, its keys texts; empty for nothing."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take up a state that `state` returned, empty at the start of a run. Called once, before the first step.

        Raises:
            UserError: it is none of this component's.
        """

    def rewind(self, step: int, state: dict[str, Any]) -> None:
        """The run goes on behind an earlier step, whose checkpoint had this state."""
        self.load_state(state)

    def close(self) -> None:
        """Training has ended, well or badly; always called. Not collective."""


@dataclass(frozen=True)
class Context:
    """What a component from outside may build on."""

    config: Config
    plan: RunPlan
    axes: Axes
    device: torch.device
    engine: Engine
    recorder: Recorder
