"""A schedule of one's own: a file with a line for each rank, and between commas a pass for each moment.

    0F0,0F1,,0B0,,0B1            chunk 0, micro-batches 0 and 1: forward, forward, then backward
    ,1F0,1B0,1F1,1B1

A pass is chunk, kind and micro-batch (`operations`); an empty place says nothing. It is the form in which
`torch.distributed.pipelining` writes its own schedules, so those are read as well; what it overlaps, as in
`(0F1;7B0)OVERLAP_F_B`, is done one after the other here. The file says where the chunks are, and holds for as many
micro-batches as stand in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from megalite.parallel.schedules.operations import (
    KINDS,
    ChunkPlacement,
    Operation,
    PipelineSchedule,
    ScheduleError,
    make_schedule,
)

PASS = re.compile(r"([0-9]{1,6})([A-Z]+)([0-9]{1,6})")
PAIR = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


def read_schedule(path: Path) -> PipelineSchedule:
    """Read a schedule; whether it can run is for `proof` to say.

    Raises:
        ScheduleError: the file cannot be read, or what stands in it is no schedule; with line and column.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()  # spreadsheets write a mark first
    except (OSError, ValueError) as error:
        raise ScheduleError(f"{path}: cannot be read ({error})") from error
    while lines and not lines[-1].strip():
        lines.pop()
    orders = [list(_read_line(line, f"{path}:{number}")) for number, line in enumerate(lines, start=1)]
    if not any(orders):
        raise ScheduleError(f"{path}: found no pass, expected a line for each rank, as in 0F0,0F1,0B0,0B1")
    everything = [operation for order in orders for operation in order]
    num_micro_batches = 1 + max(operation.micro_batch for operation in everything)
    return make_schedule(_find_chunks(orders, path), num_micro_batches, orders)


def write_schedule(schedule: PipelineSchedule) -> str:
    """A schedule as such a file holds it."""
    return "".join(",".join(map(str, order)) + "\n" for order in schedule.orders)


def _read_line(line: str, where: str) -> Iterator[Operation]:
    for column, place in enumerate(line.split(","), start=1):
        words = place.strip().strip('"')
        pair = PAIR.fullmatch(words)
        for word in pair[1].split(";") if pair else [words]:
            if not word.strip():
                continue
            found = PASS.fullmatch(word.strip())
            if found is None or found[2] not in KINDS:
                raise ScheduleError(
                    f"{where}: place {column}: found {word.strip()!r}, expected chunk, one of {', '.join(KINDS)}, and "
                    "micro-batch, as in 0F3"
                )
            kind = next(kind for kind in KINDS if kind == found[2])
            yield Operation(kind, int(found[1]), int(found[3]))


def _find_chunks(orders: Sequence[Sequence[Operation]], path: Path) -> ChunkPlacement:
    """Where the chunks are: each with the first rank that does anything of it."""
    holders: dict[int, int] = {}
    for rank, order in enumerate(orders):
        for operation in order:
            holders.setdefault(operation.chunk, rank)
    missing = sorted(set(range(max(holders) + 1)) - set(holders))
    if missing:
        raise ScheduleError(f"{path}: no rank does chunk {missing[0]}; found chunks up to {max(holders)}")
    idle = sorted(set(range(len(orders))) - set(holders.values()))
    if idle:
        raise ScheduleError(f"{path}:{idle[0] + 1}: rank {idle[0]} has no chunk of its own")
    return ChunkPlacement(tuple(holders[chunk] for chunk in range(len(holders))))
