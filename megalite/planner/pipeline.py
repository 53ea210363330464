"""A pipeline looked at before it runs: when each stage does what, how long it waits, what it keeps."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.pipeline import chunk_costs, pipeline_schedule, proven_programs
from megalite.config.plan import RunPlan
from megalite.config.schema import Config
from megalite.config.wording import counted
from megalite.parallel.schedules.operations import PipelineSchedule
from megalite.parallel.schedules.proof import kept_after
from megalite.parallel.schedules.simulation import Timeline, simulate


@dataclass(frozen=True)
class PipelineReport:
    """A step of a pipeline, proven to end."""

    schedule: PipelineSchedule
    timeline: Timeline
    """In multiply-adds of a token: the blocks' work as the config describes it, messages not counted."""
    num_messages: int
    """Sent in a step, by all stages."""
    kept: tuple[int, ...]
    """Micro-batches, times chunks, that each stage keeps for backward passes at most."""


def report_pipeline(config: Config, plan: RunPlan, num_micro_batches: int) -> PipelineReport:
    """Order, prove and time a step.

    Raises:
        ScheduleError: no step of so many micro-batches can run.
    """
    schedule = pipeline_schedule(config, plan, num_micro_batches)
    programs = proven_programs(config, plan, schedule)
    return PipelineReport(
        schedule,
        simulate(schedule, chunk_costs(config, plan)),
        num_messages=sum(instruction.what == "send" for program in programs for instruction in program),
        kept=tuple(max(kept_after(order), default=0) for order in schedule.orders),
    )


def describe(report: PipelineReport, config: Config, plan: RunPlan) -> list[str]:
    """The report in sentences."""
    schedule, bubbles = report.schedule, report.timeline.bubbles
    shares = ", ".join(f"{100 * bubble:.1f}" for bubble in bubbles)
    return [
        f"{config.parallel.schedule}: {plan.pp} stages, {len(plan.chunk_ranks)} chunks, "
        f"{counted(schedule.num_micro_batches)} a step",
        f"stages wait {100 * report.timeline.bubble:.1f} % of the step (by stage: {shares})",
        "micro-batches, times chunks, that each stage keeps for backward passes at most: "
        + ", ".join(map(str, report.kept)),
        f"proven: each pass is there once and finds its inputs, each of {report.num_messages} messages is sent and "
        "received once, and no stage waits for ever, even if every send waits for its receiver",
    ]
