"""Traces of a run, read and told: a table of the ranks, and of one rank its phases and its longest ops."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.errors import UserError
from megalite.page.numbers import size
from megalite.page.terminal import FittingTable, figures
from megalite.profile.breakdown import Breakdown, break_down
from megalite.profile.intervals import contains
from megalite.profile.trace import MemoryTimeline, Trace, read_trace

FOLDER = "profile"
NAME = re.compile(r"steps-(\d+)-(\d+)-rank-(\d+)\.json\.gz")
LONGEST_NAME = 60
"""Characters of a kernel's name."""


@dataclass(frozen=True)
class RankTrace:
    """A rank's trace, and its sums."""

    rank: int
    steps: str
    """`A:B`, the steps A to B - 1; empty where the file's name does not say."""
    path: Path
    trace: Trace
    times: Breakdown

    @property
    def num_steps(self) -> int:
        """Traced ones."""
        return self.trace.num_steps

    def record(self, top: int) -> dict[str, Any]:
        """As JSON has it, in seconds a step."""
        scale, times = 1e-6 / self.num_steps, self.times
        return {
            "rank": self.rank,
            "steps": self.steps,
            "path": str(self.path),
            "device": self.trace.device,
            "seconds_per_step": scale * times.total,
            "phases": {
                phase: {"computing": scale * each.computing, "idle": scale * each.idle}
                for phase, each in times.phases.items()
            },
            "communication": scale * times.communication,
            "communication_exposed": scale * times.exposed,
            "idle_share": times.idle / times.total,
            "ops": [
                {"name": op.name, "count_per_step": op.count / self.num_steps, "seconds": scale * op.time}
                for op in self.trace.ops[:top]
            ],
            "peak_bytes": None if (memory := self.trace.memory) is None else int(memory.allocated.max()),
        }


def read_run(path: Path, steps: str | None = None) -> list[RankTrace]:
    """The traces of a run's folder, or the one of a file.

    Args:
        steps: `A:B` of those that are wanted; None for the newest.

    Raises:
        UserError: there are none, or a file is to have the steps of others.
    """
    if path.is_file() and steps is not None:
        raise UserError(f"--steps {steps}: {path} is a trace, of its own steps; give the run's folder, or leave it out")
    if path.is_file():
        return [_read(path, "", 0)]
    found: dict[str, list[tuple[int, Path]]] = {}
    for file in (path / FOLDER).glob("*.json.gz") if path.is_dir() else ():
        if match := NAME.fullmatch(file.name):
            found.setdefault(f"{match[1]}:{int(match[2]) + 1}", []).append((int(match[3]), file))
    if not found:
        raise UserError(
            f"{path}: no traces in {path / FOLDER}; train with monitor.profile={{steps: A:B}}, and give the run's "
            "folder or a trace"
        )
    if steps is not None and steps not in found:
        raise UserError(f"--steps {steps}: {path} has traces of {', '.join(sorted(found))}")
    chosen = steps or max(found, key=lambda name: max(file.stat().st_mtime for _, file in found[name]))
    return [_read(file, chosen, rank) for rank, file in sorted(found[chosen])]


def _read(path: Path, steps: str, rank: int) -> RankTrace:
    num_steps = None
    if match := NAME.fullmatch(path.name):
        first, last, rank = map(int, match.groups())
        steps, num_steps = f"{first}:{last + 1}", last + 1 - first
    trace = read_trace(path, num_steps)
    return RankTrace(rank, steps, path, trace, break_down(trace.activity))


def tables(traces: Sequence[RankTrace], rank: int | None, top: int) -> Iterator[FittingTable]:
    """Everything for a terminal.

    Args:
        rank: which to show by phase and op; None for the slowest.
        top: ops to show.

    Raises:
        UserError: there is no trace of this rank.
    """
    yield _ranks(traces)
    one = max(traces, key=lambda each: each.times.total / each.num_steps) if rank is None else None
    for each in traces:
        one = each if each.rank == rank else one
    if one is None:
        raise UserError(f"--rank {rank}: there are traces of {', '.join(str(each.rank) for each in traces)}")
    yield _phases(one)
    yield _ops(one, top)


def _ranks(traces: Sequence[RankTrace]) -> FittingTable:
    said = f"steps {traces[0].steps}" if traces[0].steps else traces[0].path.name
    table = figures("rank", "ms a step", "computing", "communication", "exposed", "idle", title=said)
    for each in traces:
        times, count = each.times, each.num_steps
        table.add_row(
            str(each.rank),
            f"{times.total / count / 1e3:.2f}",
            _share(times.computing, times.total),
            _share(times.communication, times.total),
            _share(times.exposed, times.total),
            _share(times.idle, times.total),
        )
    return _right(table)


def _phases(one: RankTrace) -> FittingTable:
    """A row a phase, whose parts add up to the step's time."""
    times, scale = one.times, 1e3 * one.num_steps
    peaks = peaks_by_phase(one.trace)
    columns = ("phase", "computing, ms", "idle, ms", "together", *(("most allocated",) if peaks else ()))
    table = figures(*columns, title=f"rank {one.rank}, a step")
    for phase, each in times.phases.items():
        if each.computing or each.idle:
            cells = [f"{each.computing / scale:.2f}", f"{each.idle / scale:.2f}"]
            cells.append(_share(each.computing + each.idle, times.total))
            table.add_row(phase, *cells, *((size(peaks[phase]) if phase in peaks else "",) if peaks else ()))
    rest = ("",) if peaks else ()
    table.add_row(
        "exposed communication", "", f"{times.exposed / scale:.2f}", _share(times.exposed, times.total), *rest
    )
    return _right(table)


def _ops(one: RankTrace, top: int) -> FittingTable:
    what = "kernel" if one.trace.device == "cuda" else "op, without what it calls"
    table = figures(what, "a step", "ms a step", "share", title=f"rank {one.rank}, the longest")
    for op in one.trace.ops[:top]:
        name = op.name if len(op.name) <= LONGEST_NAME else f"{op.name[: LONGEST_NAME - 1]}…"
        cells = (f"{op.count / one.num_steps:.4g}", f"{op.time / 1e3 / one.num_steps:.2f}")
        table.add_row(name.replace("[", r"\["), *cells, _share(op.time, one.times.total))
    return _right(table)


def peaks_by_phase(trace: Trace) -> dict[str, int]:
    """The most that was allocated while the program stood in each phase; empty for a trace without memory."""
    memory = trace.memory
    if memory is None:
        return {}
    start = trace.activity.steps[0, 0]
    found = {}
    for phase, where in trace.activity.host.items():
        inside = memory.allocated[contains(where, memory.times + start)]
        if len(inside):
            found[phase] = int(inside.max())
    return found


def memory_of(one: RankTrace) -> MemoryTimeline:
    """Raises UserError: the trace has none."""
    if one.trace.memory is None:
        raise UserError(f"{one.path}: memory was not traced; set memory: true in monitor.profile")
    return one.trace.memory


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %"


def _right(table: FittingTable) -> FittingTable:
    for column in table.columns[1:]:
        column.justify = "right"
    return table
