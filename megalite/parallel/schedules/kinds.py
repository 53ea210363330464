"""The schedules that a config can name, and files of one's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megalite.parallel.schedules.files import read_schedule
from megalite.parallel.schedules.operations import ChunkPlacement, PipelineSchedule, PlacementKind, ScheduleError, place
from megalite.parallel.schedules.orders import interleaved, one_f_one_b, zb_h1
from megalite.parallel.schedules.simulation import ChunkCosts
from megalite.parallel.schedules.v_orders import dualpipe_v, zb_v

Costs = tuple[ChunkCosts, ...]


@dataclass(frozen=True)
class ScheduleKind:
    """One way to order passes."""

    placement: PlacementKind
    chunks: int | None
    """A stage's; None for two or more."""
    make: Callable[[int, int, Costs], PipelineSchedule]
    """Given pp, micro-batches and the chunks' costs; there are pp times as many chunks as a stage has."""
    is_split: bool = False
    """Backward passes are cut in two."""
    least_micro_batches: Callable[[int], int] = lambda pp: 1
    """Given pp."""


SCHEDULES: dict[str, ScheduleKind] = {
    "1f1b": ScheduleKind("loop", 1, lambda pp, m, costs: one_f_one_b(pp, m)),
    "interleaved": ScheduleKind("loop", None, lambda pp, m, costs: interleaved(pp, m, len(costs) // pp)),
    "zb-h1": ScheduleKind("loop", 1, lambda pp, m, costs: zb_h1(pp, m), is_split=True),
    "zb-v": ScheduleKind("v", 2, zb_v, is_split=True),
    "dualpipe-v": ScheduleKind("v", 2, lambda pp, m, costs: dualpipe_v(pp, m), True, lambda pp: 2 * pp),
}

SUFFIX = ".csv"
"""Of a file of one's own."""


def is_file(name: str) -> bool:
    """Whether a schedule is a file."""
    return name.endswith(SUFFIX)


def chunks_per_stage(name: str, given: int | None) -> int:
    """Chunks that each stage holds, when a config says so many, or nothing."""
    return given or SCHEDULES[name].chunks or 2


def find_placement(name: str, pp: int, chunks: int | None) -> ChunkPlacement:
    """Which stage holds which chunk.

    Raises:
        ScheduleError: the file cannot be read.
    """
    if is_file(name):
        return read_schedule(Path(name)).placement
    return place(SCHEDULES[name].placement, pp, chunks_per_stage(name, chunks))


def find_schedule(name: str, pp: int, num_micro_batches: int, costs: Costs) -> PipelineSchedule:
    """The order of passes of a step.

    Raises:
        ScheduleError: there is none for so many micro-batches, or the file is none.
    """
    if not is_file(name):
        return SCHEDULES[name].make(pp, num_micro_batches, costs)
    schedule = read_schedule(Path(name))
    if schedule.num_micro_batches != num_micro_batches:
        raise ScheduleError(
            f"{name}: is for {schedule.num_micro_batches} micro-batches, and a step has {num_micro_batches}"
        )
    return schedule
