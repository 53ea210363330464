"""A pipeline looked at before it runs: when each stage does what, how long it waits, what it keeps."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.pipeline import chunk_costs, pipeline_schedule, proven_programs
from megalite.config.plan import RunPlan
from megalite.config.schema import Config
from megalite.parallel.schedules.operations import PipelineSchedule
from megalite.parallel.schedules.simulation import Timeline, simulate


@dataclass(frozen=True)
class PipelineReport:
    """A step of a pipeline, proven to end."""

    schedule: PipelineSchedule
    timeline: Timeline
    """In multiply-adds of a token: the blocks' work as the config describes it, messages not counted."""
    num_messages: int
    """Sent in a step, by all stages."""
    in_flight: tuple[int, ...]
    """Micro-batches, times chunks, that each stage keeps for backward passes at most."""


def report_pipeline(config: Config, plan: RunPlan, num_micro_batches: int) -> PipelineReport:
    """Order, prove and time a step.

    Raises:
        ScheduleError: no step of so many micro-batches can run.
    """
    schedule = pipeline_schedule(config, plan, num_micro_batches)
    programs = proven_programs(config, plan, num_micro_batches)
    return PipelineReport(
        schedule,
        simulate(schedule, chunk_costs(config, plan)),
        num_messages=sum(instruction.what == "send" for program in programs for instruction in program),
        in_flight=tuple(_most_in_flight(schedule, stage) for stage in range(plan.pp)),
    )


def describe(report: PipelineReport, config: Config, plan: RunPlan) -> list[str]:
    """The report in sentences."""
    schedule, bubbles = report.schedule, report.timeline.bubbles
    shares = ", ".join(f"{100 * bubble:.1f}" for bubble in bubbles)
    return [
        f"{config.parallel.schedule}: {plan.pp} stages, {len(plan.chunk_ranks)} chunks, {schedule.num_micro_batches} "
        "micro-batches a step",
        f"stages wait {100 * report.timeline.bubble:.1f} % of the step (by stage: {shares})",
        "micro-batches in flight, chunk by chunk, at most: " + ", ".join(map(str, report.in_flight)),
        f"proven: each pass is there once and finds its inputs, each of {report.num_messages} messages is sent and "
        "received once, and no stage waits for ever, even if every send waits for its receiver",
    ]


def _most_in_flight(schedule: PipelineSchedule, stage: int) -> int:
    """Forward passes of a stage whose backward pass is yet to come, at most; a split one has come with its I."""
    count = most = 0
    for operation in schedule.orders[stage]:
        count += {"F": 1, "B": -1, "I": -1, "W": 0}[operation.kind]
        most = max(most, count)
    return most
