"""The schedules that a config can name, and files of one's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from megalite.parallel.schedules.files import read_schedule
from megalite.parallel.schedules.operations import ChunkPlacement, PipelineSchedule, PlacementKind, place
from megalite.parallel.schedules.orders import interleaved, one_f_one_b, zb_h1
from megalite.parallel.schedules.proof import check_kept
from megalite.parallel.schedules.v_orders import dualpipe_v, zb_v


@dataclass(frozen=True)
class ScheduleKind:
    """One way to order passes."""

    placement: PlacementKind
    chunks: int | None
    """A stage's; None for two or more."""
    make: Callable[[int, int, int], PipelineSchedule]
    """Given pp, micro-batches, and chunks of a stage."""
    most_kept: Callable[[int, int, int, int], int]
    """Given pp, micro-batches, chunks of a stage, and the stage: micro-batches, times chunks, that it keeps at most."""
    is_split: bool = False
    """Backward passes are cut in two."""
    least_micro_batches: Callable[[int], int] = lambda pp: 1
    """Given pp."""


def _kept_by_interleaved(pp: int, num_micro_batches: int, chunks: int, stage: int) -> int:
    """A group through all chunks but the last, and what is on its way to the pipeline's end and back."""
    group = pp + num_micro_batches % pp if num_micro_batches >= pp else num_micro_batches
    return (chunks - 1) * group + 2 * (pp - 1 - stage) + 1


SCHEDULES: dict[str, ScheduleKind] = {
    "1f1b": ScheduleKind("loop", 1, lambda pp, m, chunks: one_f_one_b(pp, m), lambda pp, m, chunks, stage: pp - stage),
    "interleaved": ScheduleKind("loop", None, interleaved, _kept_by_interleaved),
    "zb-h1": ScheduleKind(
        "loop", 1, lambda pp, m, chunks: zb_h1(pp, m), lambda pp, m, chunks, stage: pp, is_split=True
    ),
    "zb-v": ScheduleKind("v", 2, lambda pp, m, chunks: zb_v(pp, m), lambda pp, m, chunks, stage: 2 * pp, is_split=True),
    "dualpipe-v": ScheduleKind(
        "v",
        2,
        lambda pp, m, chunks: dualpipe_v(pp, m),
        lambda pp, m, chunks, stage: 2 * pp + 1,
        is_split=True,
        least_micro_batches=lambda pp: 2 * pp,
    ),
}

SUFFIX = ".csv"
"""Of a file of one's own."""


def is_file(name: str) -> bool:
    """Whether a schedule is a file."""
    return name.endswith(SUFFIX)


def chunks_per_stage(name: str, given: int | None) -> int:
    """Chunks that each stage holds, when a config says so many, or nothing."""
    return given or SCHEDULES[name].chunks or 2


def read_own(name: str) -> PipelineSchedule | None:
    """A schedule of one's own; None where the name is that of ours.

    Raises:
        ScheduleError: the file cannot be read.
    """
    return read_schedule(Path(name)) if is_file(name) else None


def find_placement(name: str, pp: int, chunks: int | None) -> ChunkPlacement:
    """Which stage holds which chunk, in a schedule of ours."""
    return place(SCHEDULES[name].placement, pp, chunks_per_stage(name, chunks))


def find_schedule(name: str, pp: int, num_micro_batches: int, chunks: int | None = None) -> PipelineSchedule:
    """The order of passes of a step, by a schedule of ours.

    Args:
        chunks: of a stage; None for what the schedule has.

    Raises:
        ScheduleError: there is none for so many micro-batches, or it keeps more of them than is said of it.
    """
    return _make(SCHEDULES[name], pp, num_micro_batches, chunks_per_stage(name, chunks))


@lru_cache(maxsize=256)
def _make(kind: ScheduleKind, pp: int, num_micro_batches: int, chunks: int) -> PipelineSchedule:
    """A search, whose result is asked for again and again while a config is checked and plans are compared."""
    schedule = kind.make(pp, num_micro_batches, chunks)
    check_kept(schedule, [kind.most_kept(pp, num_micro_batches, chunks, stage) for stage in range(pp)])
    return schedule
