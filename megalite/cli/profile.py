"""`megalite profile`: traced steps of a run, summed up."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megalite.cli.paths import named_drawing


def profile(
    run: Annotated[Path, typer.Argument(help="A run's folder, or a trace.", show_default=False)],
    steps: Annotated[
        str | None, typer.Option(help="A:B of the traces. (default: the newest)", show_default=False)
    ] = None,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Shown by phase and op. (default: the slowest)", show_default=False)
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Ops or kernels to show.")] = 12,
    memory: Annotated[
        Path | None,
        typer.Option(
            callback=named_drawing, help="Draw what is allocated into this file, .svg or .png.", show_default=False
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> None:
    """Sum up traced steps (monitor.profile): phases, exposed communication, idle shares, the longest ops."""
    import json

    from rich.console import Console

    from megalite.monitor.curves import Curve, draw
    from megalite.profile.summary import memory_of, read_run, tables

    found = read_run(run, steps)
    shown = list(tables(found, rank, top))
    if as_json:
        typer.echo(json.dumps({"ranks": [each.record(top) for each in found]}))
    else:
        console = Console()
        for table in shown:
            console.print(table)
    if memory is not None:
        chosen = [each for each in found if rank in (None, each.rank)]
        lines = [(each.rank, memory_of(each).stairs()) for each in chosen]
        curves = [Curve(f"rank {number}", *stairs, panel="allocated, MB") for number, stairs in lines]
        draw(
            memory,
            curves,
            x_label="ms from the first traced step on",
            title=f"{run.name}: memory, steps {found[0].steps}",
        )
        if not as_json:
            typer.echo(f"drawn into {memory}")
