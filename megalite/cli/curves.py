"""`megalite report`: runs that have trained, drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megalite.cli.paths import named_file, not_an_input_but

LONG_READ_BYTES = 20_000_000
"""Of metrics: what is read in under a second says nothing of its progress."""


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, still going or ended in any way.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            callback=named_file,
            help="File to write. (default: report.html in the run's folder, here for several)",
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

    not_an_input_but(".html", out, *runs)
    with progress_on(sys.stderr) if metrics_bytes(runs) > LONG_READ_BYTES else nullcontext() as progress:
        path, found = write_report(runs, out, progress=progress)
    for run in found:
        typer.echo(f"{run.name}: {status(run, time.time())[0]}")
        for problem in run.problems:
            typer.echo(f"  {problem}")
    typer.echo(f"{path} ({path.stat().st_size / 1000:,.0f} kB)")
