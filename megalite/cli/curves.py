"""What is drawn: `megalite report` of runs that have trained, `megalite schedule plot` of a config before it does."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megalite.cli.paths import named

LONG_READ_BYTES = 20_000_000
"""Of metrics: what is read in under a second says nothing of its progress."""


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, still going or ended in any way.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            callback=named,
            help="File to write. [default: report.html in the run's folder, here for several]",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Draw runs as one HTML file: curves, events, where the time went, settings. No network is needed to read it."""
    import sys
    import time
    from contextlib import nullcontext

    from megalite.progress import progress_on
    from megalite.report.page import metrics_bytes, write_report
    from megalite.report.sections import status

    with progress_on(sys.stderr) if metrics_bytes(runs) > LONG_READ_BYTES else nullcontext() as progress:
        path, found = write_report(runs, out, progress=progress)
    for run in found:
        typer.echo(f"{run.name}: {status(run, time.time())[0]}")
        for problem in run.problems:
            typer.echo(f"  {problem}")
    typer.echo(f"{path} ({path.stat().st_size / 1000:,.0f} kB)")


schedule = typer.Typer(help="Look at the schedule of a config.", no_args_is_help=True)


@schedule.callback()
def root() -> None:
    """Look at the schedule of a config."""


@schedule.command()
def plot(
    config: Annotated[Path, typer.Argument(help="A run's YAML file.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Settings that replace the file's: section.key=value ...", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", callback=named, help="Draw it into this file, .svg or .png.", show_default=False),
    ] = None,
) -> None:
    """Draw the learning rate over the steps, and the batch size where it grows: as text, and into a file if asked."""
    from megalite.config.load import load_config
    from megalite.config.plan import default_world_size
    from megalite.config.validate import validate
    from megalite.monitor.curves import draw, sketch
    from megalite.monitor.schedule_curves import schedule_curves

    loaded = load_config(config, overrides or ())
    validate(loaded, default_world_size(loaded))
    curves = schedule_curves(loaded)
    for curve in curves:
        typer.echo(sketch(curve))
    if out is not None:
        draw(out, curves, x_label="step", title=f"{config.stem}: {loaded.schedule.name}")
        typer.echo(f"drawn into {out}")
