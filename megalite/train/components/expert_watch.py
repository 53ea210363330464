"""How evenly tokens go to experts, step by step, and what follows when a router collapses onto few of them.

A router that sends all tokens to the same experts trains these alone, and seldom comes back. Every so many steps the
loads of the last one are looked at, which all ranks of a stage have:

    experts.jsonl    what every expert had
    metrics.jsonl    expert_load_max, expert_load_entropy, dead_experts of the block where each is worst, and, where
                     experts have room for so many, dropped_choices likewise
    events.jsonl     router_collapsed, when a block's entropy falls below a bound; once, until it is above again

A run that this ends has gone wrong: it is saved, and is no success.
"""

from __future__ import annotations

from typing import Any

from megalite.config.sections.health import ExpertsHealthConfig
from megalite.engine.protocol import Engine, StepResult
from megalite.monitor.recorder import Recorder
from megalite.monitor.routers import load_figures
from megalite.parallel.axes import Axes
from megalite.parallel.collectives import from_all
from megalite.train.components.component import Component, Step
from megalite.train.components.rollback_limit import Unstable

WORST = {"expert_load_max": ("load_max", max), "expert_load_entropy": ("load_entropy", min)}
WORST |= {"dead_experts": ("dead_experts", max)}
"""Name of a number of metrics.jsonl -> the figure that it is the worst of, and what is worse."""


class ExpertWatch(Component):
    """Looks at the loads of experts.

    Args:
        settings: of the run.
        engine: whose stage has routers, or another stage has.
    """

    name = "expert_watch"

    def __init__(self, settings: ExpertsHealthConfig, *, engine: Engine, axes: Axes, recorder: Recorder):
        self._settings, self._engine, self._axes, self._recorder = settings, engine, axes, recorder
        self._collapsed: set[str] = set()
        self._reason = ""

    def measure(self, step: Step, result: StepResult) -> None:
        is_look, every = step.number % self._settings.every == 0, self._settings.loads_every
        is_record = every is not None and step.number % every == 0
        if not is_look and not is_record:
            return
        loads: dict[str, list[float]] = {}
        for of_stage in from_all(self._engine.stage.routers.loads(), self._axes.pp):
            loads |= of_stage
        if is_record and loads:
            self._recorder.experts(step.number, loads)
        if is_look and loads:
            self._look(step, {name: load_figures(counts) for name, counts in loads.items()})
            dropped = [
                part for each in from_all(self._engine.stage.routers.dropped(), self._axes.pp) for part in each.values()
            ]
            step.figures |= {"dropped_choices": max(dropped)} if dropped else {}

    def _look(self, step: Step, blocks: dict[str, dict[str, float]]) -> None:
        for name, (figure, worse) in WORST.items():
            step.figures[name] = worse(figures[figure] for figures in blocks.values())
        self._judge(step.number, {block: figures["load_entropy"] for block, figures in blocks.items()})

    def stop_reason(self) -> str:
        return self._reason

    def finish(self, step: int) -> None:
        """The run has come to its end.

        Raises:
            Unstable: routers have collapsed, and the settings end the run for it.
        """
        if self._reason:
            raise Unstable(
                f"{self._reason}; the run ends at step {step} (health.experts.action=stop): begin again from a "
                "checkpoint before, with a higher model.moe.aux_loss, bias_rate or z_loss or a lower optimizer.lr"
            )

    def state(self) -> dict[str, Any]:
        return {"collapsed": sorted(self._collapsed)} if self._collapsed else {}

    def load_state(self, state: dict[str, Any]) -> None:
        self._collapsed, self._reason = set(state.get("collapsed", ())), ""

    def _judge(self, step: int, entropies: dict[str, float]) -> None:
        least = self._settings.least_entropy
        for block, entropy in entropies.items():
            if entropy >= least:
                self._collapsed.discard(block)
            elif block not in self._collapsed:
                self._collapsed.add(block)
                what = f"its loads have an entropy of {entropy:.2f} of even ones, at least {least:g} is asked for"
                why = f"the router of {block} has collapsed: {what}"
                self._recorder.note("router_collapsed", step, why=why, block=block)
        if self._collapsed and self._settings.action == "stop":
            self._reason = f"routers have collapsed: {', '.join(sorted(self._collapsed))}"
