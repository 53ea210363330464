"""Tables of `megalite plan`: layouts, what their seconds go into, and the points of a curve."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from megalite.planner.estimate import Estimate
    from megalite.planner.scaling import Point

GIB = 2**30


def layouts_table(title: str, found: Sequence[Estimate], ranks: int) -> Table:
    """A row each, the quickest first."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    of_memory = memory_column(found[0])
    for name in ("", "seconds", "tokens/s a rank", "MFU", of_memory, "most goes into", "overrides"):
        table.add_column(name, justify="left" if name in ("most goes into", "overrides") else "right")
    for number, each in enumerate(found, start=1):
        beside = f" + {max(each.host) / GIB:.1f} of the host's" if any(each.host) else ""
        memory = f"{max(each.memory) / GIB:.1f}{beside}" + ("" if each.fits else " (does not fit)")
        numbers = f"{each.seconds:.3g}", f"{each.tokens_per_second / ranks:,.0f}", f"{100 * each.mfu:.1f} %", memory
        table.add_row(str(number), *numbers, each.bound_by, shlex.join(each.overrides) or "as it is")
    return table


def parts_table(found: Sequence[Estimate]) -> Table:
    """Seconds of the same, what the first has most of first."""
    from rich import box
    from rich.table import Table

    names = sorted(
        {name for each in found for name in each.parts}, key=lambda name: (-found[0].parts.get(name, 0.0), name)
    )
    table = Table(title="seconds of a step", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("", *names):
        table.add_column(name, justify="right")
    for number, each in enumerate(found, start=1):
        table.add_row(str(number), *(f"{each.parts.get(name, 0.0):.3g}" for name in names))
    return table


def scaling_table(title: str, points: Sequence[Point]) -> Table:
    """A row each, of growing ranks."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    of_memory = memory_column(points[0].best)
    for name in ("ranks", "batch", "seconds", "tokens/s", "MFU", "kept", of_memory, "most goes into", "overrides"):
        table.add_column(name, justify="left" if name in ("most goes into", "overrides") else "right")
    for point in points:
        best = point.best
        numbers = f"{best.seconds:.3g}", f"{best.tokens_per_second:,.0f}", f"{100 * best.mfu:.1f} %"
        kept, memory = f"{100 * point.efficiency:.0f} %", f"{max(best.memory) / GIB:.1f}"
        words = best.bound_by, shlex.join(best.overrides) or "as it is"
        table.add_row(f"{point.ranks:,}", f"{point.global_batch_size:,}", *numbers, kept, memory, *words)
    return table


def memory_column(first: Estimate) -> str:
    """What is held against a machine's memory: the tensors of a rank, or on CPUs all of its process."""
    return "GiB a rank" if first.compared == "tensors" else "GiB a process"
